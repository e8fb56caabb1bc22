"""PEFT LoRA folders -> checked weights -> the adapters of one model."""

from precache.adapters.bank import BASE_NAME, Adapter, AdapterBank, AdapterNameError, require_name
from precache.adapters.checks import MAX_LORA_RANK
from precache.adapters.spec import TARGETS, AdapterSpec, ModelShape
from precache.adapters.weights import LoraModule, LoraWeights, load_adapter

__all__ = [
    "BASE_NAME",
    "MAX_LORA_RANK",
    "TARGETS",
    "Adapter",
    "AdapterBank",
    "AdapterNameError",
    "AdapterSpec",
    "LoraModule",
    "LoraWeights",
    "ModelShape",
    "load_adapter",
    "require_name",
]
