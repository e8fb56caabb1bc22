"""adapter_config.json of a PEFT LoRA folder, checked, and the shape of the model that adapters must fit.

Owns reading and typing the config. Collects what is wrong with its fields instead of raising at the first one, so that
the loader can name everything in one error. Decides nothing about tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from precache.adapters.fields import unsupported_fields
from precache.adapters.matching import (
    TARGETS,
    TargetRule,
    find_pattern,
    layer_regex,
    module_path,
    suffix_regex,
)
from precache.adapters.patterns import PatternMatcher
from precache.errors import AdapterFormatError

CONFIG_NAME = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20

__all__ = ["CONFIG_NAME", "MAX_CONFIG_BYTES", "TARGETS", "AdapterSpec", "ModelShape", "read_spec"]


@dataclass(frozen=True)
class ModelShape:
    """What adapters must fit; the engine fills it in from the loaded model."""

    num_layers: int
    in_features: Mapping[str, int]  # by target module name
    out_features: Mapping[str, int]
    vocab_size: int
    num_kv_heads: int
    head_dim: int
    base_names: tuple[str, ...] = ()  # names under which the model is known


@dataclass(frozen=True)
class AdapterSpec:
    """The fields of adapter_config.json that precache uses, with PEFT's defaults for absent ones."""

    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_rule: TargetRule | None  # None: the config names no target modules
    base_model_name_or_path: str | None
    matcher: PatternMatcher  # of all the patterns here
    problems: tuple[str, ...]  # every field that is unsupported or has an unusable value

    def rank(self, layer: int, target: str) -> int:
        """The rank that the config gives to a module."""
        return find_pattern(self.rank_pattern, module_path(layer, target), self.r, self.matcher)

    def scaling(self, layer: int, target: str) -> float:
        """The factor on B @ A of a module: alpha / r, or alpha / sqrt(r) with rsLoRA."""
        path = module_path(layer, target)
        alpha = find_pattern(self.alpha_pattern, path, self.lora_alpha, self.matcher)
        rank = self.rank(layer, target)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def read_spec(folder: Path) -> AdapterSpec:
    """Read and type the config of an adapter folder.

    Raises AdapterFormatError when the file is missing, too large, or not a JSON object, and OSError. Wrong fields do
    not raise: they are in `problems`.
    """
    return _Fields(
        _read_config(folder), PatternMatcher(f"adapter config {folder / CONFIG_NAME}")
    ).to_spec()


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise AdapterFormatError(
            f"adapter {folder}: no file {CONFIG_NAME}; allowed is a PEFT LoRA folder with "
            f"{CONFIG_NAME} and adapter_model.safetensors"
        )
    if (size := path.stat().st_size) > MAX_CONFIG_BYTES:
        raise AdapterFormatError(
            f"adapter config {path}: got {size} bytes, allowed are {MAX_CONFIG_BYTES}"
        )
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise AdapterFormatError(
            f"adapter config {path} is unreadable ({type(error).__name__}: {error}); "
            "allowed is one JSON object"
        ) from error
    if not isinstance(config, dict):
        raise AdapterFormatError(
            f"adapter config {path}: got a JSON {type(config).__name__}, allowed is one JSON object"
        )
    return config


class _Fields:
    """Takes typed values out of a config and remembers every one that is unusable."""

    def __init__(self, config: Mapping[str, Any], matcher: PatternMatcher) -> None:
        self._config = config
        self._matcher = matcher
        self._problems = unsupported_fields(config)

    def to_spec(self) -> AdapterSpec:
        peft_type = self._config.get("peft_type")
        if peft_type != "LORA":
            self._refuse("peft_type", peft_type, "'LORA'")
        return AdapterSpec(
            r=self._rank("r", self._config.get("r", 8)),
            lora_alpha=self._number("lora_alpha", self._config.get("lora_alpha", 8)),
            use_rslora=self._flag("use_rslora"),
            rank_pattern={k: self._rank("rank_pattern", v) for k, v in self._dict("rank_pattern")},
            alpha_pattern={
                k: self._number("alpha_pattern", v) for k, v in self._dict("alpha_pattern")
            },
            target_rule=self._target_rule(),
            base_model_name_or_path=self._base_name(),
            matcher=self._matcher,
            problems=tuple(self._problems),
        )

    def _refuse(self, field: str, got: object, allowed: str) -> None:
        self._problems.append(f"{field}: got {got!r}, allowed is {allowed}")

    def _rank(self, field: str, value: object) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return value
        self._refuse(field, value, "a positive integer")
        return 1

    def _number(self, field: str, value: object) -> float:
        # The bound keeps huge JSON integers from overflowing; no sane alpha comes near it.
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e9:
            return float(value)
        self._refuse(field, value, "a finite number up to 1e9")
        return 1.0

    def _flag(self, field: str) -> bool:
        value = self._config.get(field)
        if value is not None and not isinstance(value, bool):
            self._refuse(field, value, "true or false")
        return value is True

    def _dict(self, field: str) -> list[tuple[str, object]]:
        value = self._config.get(field) or {}
        if not isinstance(value, dict):
            self._refuse(field, value, "an object from patterns to numbers")
            return []
        return [
            (pattern, number)
            for pattern, number in value.items()
            if self._is_regex(field, pattern, suffix_regex(pattern))
        ]

    def _target_rule(self) -> TargetRule | None:
        targets = self._names("target_modules")
        excluded = self._names("exclude_modules")
        patterns = self._names("layers_pattern")
        layers = self._layers()
        if not targets:
            return None
        names = (patterns,) if isinstance(patterns, str) else patterns
        usable = tuple(
            name
            for name in names
            if name and self._is_regex("layers_pattern", name, layer_regex(name))
        )
        return TargetRule(targets, excluded, layers, usable, self._matcher)

    def _names(self, field: str) -> str | tuple[str, ...]:
        value = self._config.get(field) or ()
        if isinstance(value, str):
            # A single layers_pattern is a name like those in a list, and is checked where it is used.
            return value if field == "layers_pattern" or self._is_regex(field, value, value) else ()
        if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
            return tuple(value)
        self._refuse(field, value, "a string or a list of strings")
        return ()

    def _layers(self) -> tuple[int, ...]:
        value = self._config.get("layers_to_transform")
        layers = [] if value is None else value if isinstance(value, list) else [value]
        if all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers):
            return tuple(layers)
        self._refuse("layers_to_transform", value, "an integer or a list of integers")
        return ()

    def _is_regex(self, field: str, pattern: str, as_used: str) -> bool:
        problem = self._matcher.problem(as_used)
        if problem is not None:
            self._refuse(field, pattern, f"a regular expression ({problem})")
        return problem is None

    def _base_name(self) -> str | None:
        value = self._config.get("base_model_name_or_path")
        if value is not None and not isinstance(value, str):
            self._refuse("base_model_name_or_path", value, "a string or null")
            return None
        return value or None
