"""A PEFT LoRA folder -> checked weights with the scaling folded in.

Owns the one path on which adapter weights enter the process: everything is read and checked before anything is built,
so an adapter is either loaded as PEFT would run it, or refused with one error that names every reason.

The tensors take the dtype of the model (adapter dtype = model dtype; PEFT itself would keep fp32 beside a half base).
The scaling is multiplied into B in fp32 before that conversion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from precache.adapters.checks import MAX_LORA_RANK, RawModule, check_adapter
from precache.adapters.digest import strip_digest, weights_digest
from precache.adapters.spec import AdapterSpec, ModelShape, read_spec
from precache.adapters.tensors import MAX_WEIGHTS_BYTES, RawTensor, read_tensors
from precache.errors import AdapterFormatError, NonFiniteAdapterError


@dataclass(frozen=True, eq=False)
class LoraModule:
    """LoRA of one projection."""

    lora_a: Tensor  # [rank, in_features]
    lora_b: Tensor  # [out_features, rank], scaling folded in
    scaling: float  # what was folded


@dataclass(frozen=True, eq=False)
class LoraWeights:
    """All LoRA modules of one adapter."""

    modules: Mapping[tuple[int, str], LoraModule]  # (layer, target) -> module
    digest: str  # of scaling and of the file's own dtypes and bytes; independent of name and path
    a_digest: str  # of the loaded v_proj and k_proj A: adapters with equal ones share one strip
    warnings: tuple[str, ...] = ()


def load_adapter(
    path: str | Path,
    shape: ModelShape,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    max_lora_rank: int = MAX_LORA_RANK,
    max_bytes: int = MAX_WEIGHTS_BYTES,
) -> LoraWeights:
    """Load an adapter folder for a model of the given shape.

    Raises AdapterFormatError (missing, unreadable, not safetensors), UnsupportedAdapterError (names every unsupported
    field and tensor), AdapterShapeError (another base model) or NonFiniteAdapterError.
    """
    folder, spec, tensors = read_folder(path, max_bytes)
    modules = check_adapter(
        str(folder),
        spec,
        tensors,
        shape,
        targets=tuple(shape.in_features),
        max_lora_rank=max_lora_rank,
    )
    return build_weights(
        folder, modules, dtype=dtype, device=device, warnings=base_warnings(folder, spec, shape)
    )


def read_folder(
    path: str | Path, max_bytes: int = MAX_WEIGHTS_BYTES
) -> tuple[Path, AdapterSpec, dict[str, RawTensor]]:
    """Read config and tensors of an adapter folder; AdapterFormatError when that is not possible."""
    folder = Path(path)
    try:
        if not folder.is_dir():
            got = "a file" if folder.exists() else "no such path"
            raise AdapterFormatError(f"adapter {path}: got {got}, allowed is a PEFT LoRA folder")
        return folder, read_spec(folder), read_tensors(folder, max_bytes)
    except OSError as error:
        raise AdapterFormatError(
            f"adapter {path} is unreadable ({error}); allowed is a readable PEFT LoRA folder"
        ) from error


def build_weights(
    folder: Path,
    modules: Mapping[tuple[int, str], RawModule],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    warnings: tuple[str, ...] = (),
) -> LoraWeights:
    """Convert checked modules; NonFiniteAdapterError when one is not finite in the file or in `dtype`."""
    _require_finite(
        folder, {raw.name: raw.to_torch() for module in modules.values() for raw in module.tensors}
    )
    built = {key: _build_module(module, dtype) for key, module in modules.items()}
    _require_finite(
        folder,
        {
            f"{raw.name} (as {dtype})": tensor
            for key, module in modules.items()
            for raw, tensor in zip(
                module.tensors, (built[key].lora_a, built[key].lora_b), strict=True
            )
        },
    )
    return LoraWeights(
        modules={key: _to_device(module, device) for key, module in built.items()},
        digest=weights_digest(modules),
        a_digest=strip_digest({key: module.lora_a for key, module in built.items()}),
        warnings=warnings,
    )


def _build_module(module: RawModule, dtype: torch.dtype) -> LoraModule:
    lora_a = module.lora_a.to_torch().to(dtype, copy=True)
    lora_b = (module.lora_b.to_torch().float() * module.scaling).to(dtype)
    return LoraModule(lora_a, lora_b, module.scaling)


def _to_device(module: LoraModule, device: torch.device | str) -> LoraModule:
    return LoraModule(module.lora_a.to(device), module.lora_b.to(device), module.scaling)


def _require_finite(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    bad = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if bad:
        raise NonFiniteAdapterError(str(folder), bad)


def base_warnings(folder: Path, spec: AdapterSpec, shape: ModelShape) -> tuple[str, ...]:
    """A sentence when the config names another base model than this one; stale paths are common, so no error."""
    base = spec.base_model_name_or_path
    if base is None or not shape.base_names:
        return ()
    # Local paths differ between machines, so only the last component has to agree.
    if _last_part(base) in {_last_part(name) for name in shape.base_names}:
        return ()
    return (
        f"adapter {folder} was trained on {base!r}, the model is known as {list(shape.base_names)}; "
        "the shapes fit, so it was loaded",
    )


def _last_part(name: str) -> str:
    return name.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1].lower()
