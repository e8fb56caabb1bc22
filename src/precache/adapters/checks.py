"""Whether an adapter can be used as PEFT would use it: tensors against the config and against the model.

Owns the order of the refusals. What the adapter is (unsupported features) comes before what it was made for (shapes),
and that before what its config promises and its file does not hold, because the first often causes the next.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from precache.adapters.matching import UNSUPPORTED_MODULES, format_layers
from precache.adapters.spec import AdapterSpec, ModelShape
from precache.adapters.tensors import (
    DTYPES,
    RawTensor,
    TensorKey,
    describe_unmapped,
    duplicate_keys,
    group_names,
    parse_name,
)
from precache.errors import AdapterShapeError, UnsupportedAdapterError

MAX_LORA_RANK = 512

ModuleKey = tuple[int, str]  # (layer, target)


@dataclass(frozen=True, eq=False)
class RawModule:
    """The two tensors of a module as they lie in the file, and the factor that belongs on B."""

    lora_a: RawTensor
    lora_b: RawTensor
    scaling: float

    @property
    def tensors(self) -> tuple[RawTensor, RawTensor]:
        return self.lora_a, self.lora_b

    @property
    def rank(self) -> int:
        return self.lora_a.shape[0]


def check_adapter(
    path: str,
    spec: AdapterSpec,
    tensors: Mapping[str, RawTensor],
    shape: ModelShape,
    *,
    targets: Collection[str],
    max_lora_rank: int = MAX_LORA_RANK,
) -> dict[ModuleKey, RawModule]:
    """Return the LoRA modules of a folder, each checked, ordered by layer and target.

    `targets` are the projections that the model has. Raises UnsupportedAdapterError or AdapterShapeError.
    """
    by_key = {key: t for name, t in tensors.items() if (key := parse_name(name)) is not None}
    pairs = _pairs(by_key)
    features = _feature_problems(spec, tensors, by_key, shape)
    features += _absent_target_problems(pairs, targets)
    misfit = _first_misfit(path, pairs, shape)
    if features:
        raise UnsupportedAdapterError(path, features + ([str(misfit)] if misfit else []))
    if misfit:
        raise misfit
    promises = [
        *_layer_problems(pairs, shape),
        *_coverage_problems(spec, pairs, shape, targets),
        *_rank_problems(spec, pairs, max_lora_rank),
    ]
    if promises:
        raise UnsupportedAdapterError(path, promises)
    return {
        (layer, target): RawModule(a, b, spec.scaling(layer, target))
        for (layer, target), (a, b) in sorted(pairs.items())
    }


_Pairs = Mapping[ModuleKey, tuple[RawTensor, RawTensor]]


def _pairs(by_key: Mapping[TensorKey, RawTensor]) -> _Pairs:
    return {
        (key.layer, key.target): (tensor, by_key[key._replace(side="B")])
        for key, tensor in by_key.items()
        if key.side == "A" and key._replace(side="B") in by_key
    }


def _feature_problems(
    spec: AdapterSpec,
    tensors: Mapping[str, RawTensor],
    by_key: Mapping[TensorKey, RawTensor],
    shape: ModelShape,
) -> list[str]:
    orphans = [t.name for key, t in by_key.items() if _other_side(key) not in by_key]
    doubles = [f"{target} of layer {layer}" for layer, target, _ in duplicate_keys(tensors)]
    odd_types = [f"{t.name} ({t.dtype})" for t in by_key.values() if t.dtype not in DTYPES]
    problems = [*spec.problems, *_unsupported_targets(spec)]
    problems += describe_unmapped(tensors, shape.vocab_size)
    problems += [f"tensor {group} has no partner (A needs B)" for group in group_names(orphans)]
    problems += [f"two tensors for {double}" for double in doubles]
    problems += [
        f"dtype of {odd}: allowed are {', '.join(DTYPES)}" for odd in group_names(odd_types)
    ]
    return problems if by_key or problems else ["the weights file holds no LoRA tensor"]


def _other_side(key: TensorKey) -> TensorKey:
    return key._replace(side="B" if key.side == "A" else "A")


def _unsupported_targets(spec: AdapterSpec) -> list[str]:
    rule = spec.target_rule
    paths = [path for path in UNSUPPORTED_MODULES if rule is not None and rule.selects(path)]
    return [f"target_modules selects {path}: LoRA there is not implemented" for path in paths]


def _absent_target_problems(pairs: _Pairs, targets: Collection[str]) -> list[str]:
    absent = sorted({target for _, target in pairs} - set(targets))
    return [f"tensors for {target}, this model has no such projection" for target in absent]


def _first_misfit(path: str, pairs: _Pairs, shape: ModelShape) -> AdapterShapeError | None:
    for (_, target), (lora_a, lora_b) in sorted(pairs.items()):
        if target not in shape.in_features:
            continue
        rank = lora_a.shape[0] if lora_a.shape else 1
        wanted_a = (rank, shape.in_features[target])
        wanted_b = (shape.out_features[target], rank)
        for tensor, wanted in ((lora_a, wanted_a), (lora_b, wanted_b)):
            if tensor.shape != wanted:
                return AdapterShapeError(path, tensor.name, tensor.shape, wanted)
    return None


def _layer_problems(pairs: _Pairs, shape: ModelShape) -> list[str]:
    last = max((layer for layer, _ in pairs), default=0)
    if last < shape.num_layers:
        return []
    return [f"tensors up to layer {last}, this model has layers 0 to {shape.num_layers - 1}"]


def _coverage_problems(
    spec: AdapterSpec, pairs: _Pairs, shape: ModelShape, targets: Collection[str]
) -> list[str]:
    """Where the config and the file disagree about which modules are adapted."""
    if spec.target_rule is None:
        return []
    selected = spec.target_rule.expand(shape.num_layers, targets)
    present = {key for key in pairs if key[0] < shape.num_layers}
    missing = [
        f"the config selects {target} in {layers}, the file holds no tensors for it"
        for target, layers in _layers_by_target(selected - present)
    ]
    extra = [
        f"the file holds tensors for {target} in {layers}, the config does not select it"
        for target, layers in _layers_by_target(present - selected)
    ]
    return missing + extra


def _rank_problems(spec: AdapterSpec, pairs: _Pairs, max_lora_rank: int) -> list[str]:
    problems: dict[str, list[ModuleKey]] = {}
    for (layer, target), (lora_a, _) in pairs.items():
        if problem := _rank_problem(lora_a.shape[0], spec.rank(layer, target), max_lora_rank):
            problems.setdefault(problem, []).append((layer, target))
    return [
        f"rank of {target} in {layers}: {problem}"
        for problem, keys in problems.items()
        for target, layers in _layers_by_target(keys)
    ]


def _rank_problem(rank: int, stated: int, max_lora_rank: int) -> str | None:
    if not 1 <= rank <= max_lora_rank:
        return f"got {rank}, allowed are 1 to {max_lora_rank}"
    return None if rank == stated else f"got {rank} in the file, {stated} in the config"


def _layers_by_target(keys: Iterable[ModuleKey]) -> list[tuple[str, str]]:
    layers: dict[str, list[int]] = {}
    for layer, target in sorted(keys):
        layers.setdefault(target, []).append(layer)
    return [
        (target, f"{'layer' if len(found) == 1 else 'layers'} {format_layers(found)}")
        for target, found in sorted(layers.items())
    ]
