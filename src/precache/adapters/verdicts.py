"""Which sharing policies a set of adapters allows, and why not the others.

Owns the adapter side only: what the model adds (normalised keys) is an argument or a condition in words. The engine's
policies ask here too, so that the facts exist once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from precache.adapters.bank import Adapter
from precache.adapters.digest import STRIP_TARGETS, tensor_bytes

# Allowed for every adapter that can be loaded.
ALWAYS_ALLOWED = (
    "nonshared",
    "fullshared",
    "baseshared",
    "prelrshared",
    "rebaseshared",
    "droidspeak",
    "droidspeak-scattered",
    "cacheblend",
    "relaycaching",
    "random-layers",
    "random-tokens",
)
COMMON_A = "baselrshared"  # needs equal A matrices
CALIBRATED = "calibrated"  # needs a file that was fitted to these adapters


@dataclass(frozen=True)
class PolicyVerdict:
    """Whether adapters allow a policy; `reason` is empty when there is nothing to say."""

    policy: str
    allowed: bool
    reason: str = ""


def allowed_policies(
    adapters: Sequence[Adapter], *, key_norms: bool = False
) -> list[PolicyVerdict]:
    """One verdict per policy, for these adapters together on a model with or without key norms."""
    if obstacle := _obstacle_for_all(adapters, key_norms):
        known = (*ALWAYS_ALLOWED, CALIBRATED, COMMON_A)
        return [PolicyVerdict(policy, False, obstacle) for policy in known]
    verdicts = [PolicyVerdict(policy, allowed=True) for policy in ALWAYS_ALLOWED]
    needs = "with a calibration of these adapters (precache compare --calibrate)"
    calibrated = PolicyVerdict(CALIBRATED, True, needs)
    return [*verdicts, calibrated, _common_a_verdict(adapters)]


def _obstacle_for_all(adapters: Sequence[Adapter], key_norms: bool) -> str:
    if key_norms and (conditions := model_conditions(adapters)):
        return conditions[0]
    for other in adapters[1:]:
        if not _fit_one_model(adapters[0], other):
            return f"{adapters[0].name!r} and {other.name!r} were made for different base models"
    return ""


def _fit_one_model(one: Adapter, two: Adapter) -> bool:
    return all(
        widths_one[target] == widths_two[target]
        for widths_one, widths_two in (
            (one.shape.in_features, two.shape.in_features),
            (one.shape.out_features, two.shape.out_features),
        )
        for target in widths_one.keys() & widths_two.keys()
    )


def _common_a_verdict(adapters: Sequence[Adapter]) -> PolicyVerdict:
    difference = first_a_difference(adapters)
    if difference is not None:
        return PolicyVerdict(COMMON_A, False, describe_a_difference(difference))
    if len(adapters) == 1:
        reason = "for this adapter alone; every further one needs identical v_proj (and k_proj) A"
        return PolicyVerdict(COMMON_A, True, reason)
    return PolicyVerdict(COMMON_A, True)


def describe_a_difference(difference: tuple[int, str, str, str]) -> str:
    """A sentence for what `first_a_difference` found."""
    layer, module, first, second = difference
    return (
        f"it needs identical A matrices; {module} of layer {layer} differs "
        f"between {first!r} and {second!r}"
    )


def first_a_difference(adapters: Sequence[Adapter]) -> tuple[int, str, str, str] | None:
    """The first layer whose cached A differs: (layer, module, adapter name 1, adapter name 2), or None.

    Only A matrices whose products are cached count (v_proj, k_proj), compared bitwise in the dtype of the model.
    """
    found = [
        (layer, module, adapters[0].name, other.name)
        for other in adapters[1:]
        if other.a_digest != adapters[0].a_digest
        for layer, module in _differing_modules(adapters[0], other)
    ]
    # v_proj first: every policy caches it, k_proj only with key LoRA.
    return min(found, key=lambda item: (item[0], item[1] != "v_proj"), default=None)


def _differing_modules(first: Adapter, second: Adapter) -> list[tuple[int, str]]:
    keys = {*first.weights.modules, *second.weights.modules}
    return [
        (layer, target)
        for layer, target in sorted(keys)
        if target in STRIP_TARGETS and not _same_a(first, second, layer, target)
    ]


def _same_a(first: Adapter, second: Adapter, layer: int, target: str) -> bool:
    one, two = first.module(layer, target), second.module(layer, target)
    if one is None or two is None or one.lora_a.shape != two.lora_a.shape:
        return False
    return tensor_bytes(one.lora_a) == tensor_bytes(two.lora_a)


def model_conditions(adapters: Sequence[Adapter]) -> tuple[str, ...]:
    """What these adapters need from the model, one sentence each."""
    names = [adapter.name for adapter in adapters if adapter.has("k_proj")]
    if not names:
        return ()
    return (
        f"key LoRA (k_proj) in {', '.join(names)}: needs a model without key norms; a model that "
        "normalises its keys (Qwen3, Gemma3) cannot have a cached key corrected",
    )
