"""adapter_model.safetensors: bounded reading, and what each tensor name stands for.

Owns the file format and PEFT's tensor names. Only safetensors is read; pickle files are refused by name. The file is
read into memory once, not mapped: a mapped file that somebody truncates kills the whole process with SIGBUS.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, deserialize
from torch import Tensor

from precache.adapters.matching import TARGETS, module_path
from precache.errors import AdapterFormatError

WEIGHTS_NAME = "adapter_model.safetensors"
PICKLE_NAMES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
MAX_WEIGHTS_BYTES = 8 << 30

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}

_NAME = re.compile(
    r"base_model\.model\.(?P<path>model\.layers\.(?P<layer>\d{1,4})\.(?:self_attn|mlp)\."
    r"(?P<target>[a-z_]+))\.lora_(?P<side>[AB])(?:\.default)?\.weight"
)


@dataclass(frozen=True, eq=False)
class RawTensor:
    """One tensor as it lies in the file."""

    name: str
    dtype: str  # safetensors' spelling
    shape: tuple[int, ...]
    data: bytes | bytearray  # little-endian

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    def to_torch(self) -> Tensor:
        """The values in the file's own dtype, which must be one of DTYPES."""
        # torch warns about read-only buffers, which older versions of safetensors return.
        data = self.data if isinstance(self.data, bytearray) else bytearray(self.data)
        return torch.frombuffer(data, dtype=DTYPES[self.dtype]).reshape(self.shape)


class TensorKey(NamedTuple):
    """What a LoRA tensor's name says."""

    layer: int
    target: str
    side: str  # "A" or "B"


def read_tensors(folder: Path, max_bytes: int = MAX_WEIGHTS_BYTES) -> dict[str, RawTensor]:
    """Read every tensor of an adapter folder, by name.

    Raises AdapterFormatError when the file is missing, larger than `max_bytes`, truncated or not safetensors; OSError.
    """
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        raise AdapterFormatError(_missing_message(folder))
    if (size := path.stat().st_size) > max_bytes:
        raise AdapterFormatError(
            f"adapter weights {path}: got {size} bytes, allowed are {max_bytes}"
        )
    try:
        entries = deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise AdapterFormatError(
            f"adapter weights {path} are unreadable ({error}); "
            "allowed is a complete file in safetensors format"
        ) from error
    return {
        name: RawTensor(name, entry["dtype"], tuple(entry["shape"]), entry["data"])
        for name, entry in sorted(entries, key=lambda item: item[0])
    }


def _missing_message(folder: Path) -> str:
    pickled = [name for name in PICKLE_NAMES if (folder / name).exists()]
    if pickled:
        return (
            f"adapter {folder}: got {pickled[0]}, a pickle file that can run code; allowed is "
            f"{WEIGHTS_NAME} (PEFT's save_pretrained writes it)"
        )
    return f"adapter {folder}: no file {WEIGHTS_NAME}; allowed is a PEFT LoRA folder that has one"


def parse_name(name: str) -> TensorKey | None:
    """The module and side of a LoRA tensor, or None for a tensor that precache does not know."""
    match = _NAME.fullmatch(name)
    if match is None or match["target"] not in TARGETS:
        return None
    key = TensorKey(int(match["layer"]), match["target"], match["side"])
    # The pattern is loose about self_attn and mlp, and about leading zeros; the path is not.
    return key if module_path(key.layer, key.target) == match["path"] else None


def describe_unmapped(tensors: Mapping[str, RawTensor], vocab_size: int) -> list[str]:
    """Name every unsupported tensor; those that differ by the layer number only share one entry."""
    unmapped = [tensor for name, tensor in tensors.items() if parse_name(name) is None]
    resized = [tensor for tensor in unmapped if _is_resized(tensor, vocab_size)]
    others = [tensor.name for tensor in unmapped if not _is_resized(tensor, vocab_size)]
    return [_resized_problem(tensor, vocab_size) for tensor in resized] + [
        f"unsupported tensor {group}" for group in group_names(others)
    ]


def group_names(names: Iterable[str]) -> list[str]:
    """Tensor names with numbers as `*`, each once, with how many there are of it."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(name)
    return [
        members[0] if len(members) == 1 else f"{group} ({len(members)} tensors)"
        for group, members in groups.items()
    ]


def _is_resized(tensor: RawTensor, vocab_size: int) -> bool:
    is_table = re.search(r"(embed_tokens|lm_head)\..*weight$", tensor.name) is not None
    is_low_rank = "lora_" in tensor.name
    return is_table and not is_low_rank and tensor.shape[:1] not in ((), (vocab_size,))


def _resized_problem(tensor: RawTensor, vocab_size: int) -> str:
    return (
        f"tensor {tensor.name} has {tensor.shape[0]} rows, the vocabulary of this model has {vocab_size}; "
        "a resized vocabulary changes the token ids of every agent"
    )


def duplicate_keys(names: Iterable[str]) -> list[TensorKey]:
    """Modules that occur under two spellings of the same name."""
    keys = Counter(key for name in names if (key := parse_name(name)) is not None)
    return [key for key, count in keys.items() if count > 1]
