"""What an adapter folder holds, for people: the facts behind `precache inspect`.

Works without a model: the widths are read off the tensors then, and only their agreement with each other and with the
config is checked. Owns no printing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from precache.adapters.bank import Adapter
from precache.adapters.checks import ModuleKey, RawModule, check_adapter
from precache.adapters.spec import TARGETS, ModelShape
from precache.adapters.tensors import DTYPES, RawTensor, parse_name
from precache.adapters.weights import base_warnings, build_weights, read_folder


@dataclass(frozen=True)
class ModuleGroup:
    """The layers in which a projection has the same rank and scaling."""

    target: str
    rank: int
    scaling: float
    layers: tuple[int, ...]


@dataclass(frozen=True)
class AdapterSummary:
    """The facts of one adapter folder."""

    name: str
    path: str
    base: str | None  # base_model_name_or_path
    modules: tuple[ModuleGroup, ...]
    dtypes: tuple[str, ...]  # in the file
    num_parameters: int
    digest: str
    warnings: tuple[str, ...]


def inspect_adapter(
    path: str | Path, *, name: str, shape: ModelShape | None = None
) -> tuple[AdapterSummary, Adapter]:
    """Load a folder in fp32 for a look; `shape` None derives the model's widths from the tensors.

    Raises the errors of `load_adapter`.
    """
    folder, spec, tensors = read_folder(path)
    targets = TARGETS if shape is None else tuple(shape.in_features)
    shape = shape or infer_shape(tensors)
    modules = check_adapter(str(folder), spec, tensors, shape, targets=targets)
    weights = build_weights(
        folder,
        modules,
        dtype=torch.float32,
        device="cpu",
        warnings=base_warnings(folder, spec, shape),
    )
    summary = AdapterSummary(
        name=name,
        path=str(path),
        base=spec.base_model_name_or_path,
        modules=_group(modules),
        dtypes=_dtypes(modules),
        num_parameters=sum(raw.num_values for module in modules.values() for raw in module.tensors),
        digest=weights.digest,
        warnings=weights.warnings,
    )
    return summary, Adapter(name, weights, folder, shape)


def infer_shape(tensors: Mapping[str, RawTensor]) -> ModelShape:
    """The smallest model that the LoRA tensors fit; a width that two of them disagree on is the first one's.

    The attention heads and the vocabulary leave no trace in an adapter: one KV head, and no vocabulary unless the file
    holds embeddings.
    """
    num_layers = 1
    in_features: dict[str, int] = {}
    out_features: dict[str, int] = {}
    for name, tensor in tensors.items():
        key = parse_name(name)
        if key is None:
            continue
        num_layers = max(num_layers, key.layer + 1)
        widths = in_features if key.side == "A" else out_features
        # A is [rank, in_features], B is [out_features, rank].
        width = tensor.shape[-1:] if key.side == "A" else tensor.shape[:1]
        widths.setdefault(key.target, *(width or (0,)))
    return ModelShape(
        num_layers=num_layers,
        in_features=in_features,
        out_features=out_features,
        vocab_size=_vocab_size(tensors),
        num_kv_heads=1,
        head_dim=out_features.get("v_proj", out_features.get("k_proj", 1)),
    )


def _vocab_size(tensors: Mapping[str, RawTensor]) -> int:
    tables = [
        t for t in tensors.values() if t.name.endswith(("embed_tokens.weight", "lm_head.weight"))
    ]
    return next((table.shape[0] for table in tables if table.shape), 0)


def _group(modules: Mapping[ModuleKey, RawModule]) -> tuple[ModuleGroup, ...]:
    layers: dict[tuple[str, int, float], list[int]] = {}
    for (layer, target), module in sorted(modules.items()):
        layers.setdefault((target, module.rank, module.scaling), []).append(layer)
    groups = [ModuleGroup(*alike, tuple(found)) for alike, found in layers.items()]
    return tuple(sorted(groups, key=lambda group: (TARGETS.index(group.target), group.layers)))


def _dtypes(modules: Mapping[ModuleKey, RawModule]) -> tuple[str, ...]:
    used = {DTYPES[raw.dtype] for module in modules.values() for raw in module.tensors}
    return tuple(sorted(str(dtype).removeprefix("torch.") for dtype in used))
