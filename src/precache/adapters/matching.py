"""Which modules an adapter's config talks about, with exactly PEFT's matching rules.

Owns the mapping (layer, target) <-> module path of a Llama-like decoder and the semantics of target_modules,
exclude_modules, layers_to_transform, layers_pattern, rank_pattern and alpha_pattern. Knows no files and no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from precache.adapters.patterns import PatternMatcher

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

ALL_LINEAR = "all-linear"

# Modules that PEFT can adapt and precache cannot; `all-linear` leaves both out.
UNSUPPORTED_MODULES = ("lm_head", "model.embed_tokens")

_PARENT = {target: "self_attn" for target in TARGETS[:4]} | {
    target: "mlp" for target in TARGETS[4:]
}


def module_path(layer: int, target: str) -> str:
    """Path of a projection inside the base model; the key that PEFT's patterns are matched against."""
    return f"model.layers.{layer}.{_PARENT[target]}.{target}"


_T = TypeVar("_T")


def suffix_regex(pattern: str) -> str:
    """How PEFT applies a key of rank_pattern or alpha_pattern: to the end of a path, from a dot on."""
    return rf"(.*\.)?({pattern})$"


def layer_regex(name: str) -> str:
    """How PEFT finds the layer number under a layers_pattern."""
    return rf"(?:^|.*?\.){name}\.(?P<layer>\d+)\."


def find_pattern(patterns: Mapping[str, _T], path: str, default: _T, matcher: PatternMatcher) -> _T:
    """Value of the first pattern that matches the end of `path` at a dot (PEFT's `get_pattern_key`)."""
    for pattern, value in patterns.items():
        if matcher.match(suffix_regex(pattern), path):
            return value
    return patterns.get(path, default)


@dataclass(frozen=True)
class TargetRule:
    """The module selection of an adapter config.

    A string is a regular expression over the whole path (or "all-linear"); a tuple holds path suffixes.
    """

    target_modules: str | tuple[str, ...]
    exclude_modules: str | tuple[str, ...] = ()
    layers_to_transform: tuple[int, ...] = ()  # empty: every layer
    layers_pattern: tuple[str, ...] = ()
    matcher: PatternMatcher = field(default_factory=PatternMatcher, compare=False, repr=False)

    @property
    def is_all_linear(self) -> bool:
        return isinstance(self.target_modules, str) and self.target_modules.lower() == ALL_LINEAR

    def selects(self, path: str) -> bool:
        """Whether PEFT would put LoRA on the module at `path`."""
        if self._matches(self.exclude_modules, path):
            return False
        if self.is_all_linear:
            return path not in UNSUPPORTED_MODULES
        if not self._matches(self.target_modules, path):
            return False
        # PEFT asks for the layer only where a suffix matched, not for a module that is named in full.
        by_suffix = not isinstance(self.target_modules, str) and path not in self.target_modules
        if not (by_suffix and self.layers_to_transform):
            return True
        return self._layer_of(path) in self.layers_to_transform

    def _layer_of(self, path: str) -> int | None:
        patterns = [layer_regex(name) for name in self.layers_pattern]
        for pattern in patterns or [r".*?\.[^.]*\.(?P<layer>\d+)\."]:
            if match := self.matcher.match(pattern, path):
                return int(match["layer"])
        return None

    def _matches(self, rule: str | tuple[str, ...], path: str) -> bool:
        if isinstance(rule, str):
            return bool(rule) and self.matcher.match(rule, path, whole=True) is not None
        return any(path == suffix or path.endswith(f".{suffix}") for suffix in rule)

    def expand(self, num_layers: int, targets: Iterable[str]) -> frozenset[tuple[int, str]]:
        """Every (layer, target) of a model that the rule selects."""
        return frozenset(
            (layer, target)
            for target in targets
            for layer in range(num_layers)
            if self.selects(module_path(layer, target))
        )


def format_layers(layers: Sequence[int]) -> str:
    """Ascending layer numbers for people: 0, 1, 2, 5 as "0-2, 5"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
