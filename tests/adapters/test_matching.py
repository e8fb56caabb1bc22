"""TargetRule and find_pattern against PEFT's own functions, on configs that are easy to get wrong."""

from __future__ import annotations

from typing import Any

import pytest
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from precache.adapters.matching import (
    TARGETS,
    TargetRule,
    find_pattern,
    format_layers,
    module_path,
)
from precache.adapters.patterns import PatternMatcher

PATHS = [module_path(layer, target) for layer in (0, 1, 10, 11) for target in TARGETS] + [
    "lm_head",
    "model.embed_tokens",
]

RULES: list[dict[str, Any]] = [
    {"target_modules": ["proj"]},
    {"target_modules": ["v_proj", "lm_head"]},
    {"target_modules": ["1.self_attn.q_proj"]},
    {"target_modules": "q_proj"},
    {"target_modules": r".*\.(q|v)_proj"},
    {"target_modules": r".*layers\.1\..*"},
    {"target_modules": ["q_proj"], "layers_to_transform": [1, 10]},
    {"target_modules": ["q_proj"], "layers_to_transform": 0},
    {"target_modules": ["q_proj"], "layers_to_transform": []},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["layers", "h"]},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "blocks"},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ""},
    {"target_modules": ["model.layers.0.mlp.up_proj", "k_proj"], "layers_to_transform": [10]},
    {"target_modules": ["q_proj", "k_proj"], "exclude_modules": ["k_proj"]},
    {"target_modules": ["q_proj", "k_proj"], "exclude_modules": "k_proj"},
    {"target_modules": ["q_proj", "k_proj"], "exclude_modules": r".*\.k_proj"},
]


def _tuple(value: str | list[str] | None) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) and value else tuple(value or ())


def _rule(config: dict[str, Any]) -> TargetRule:
    def names(value: str | list[str]) -> str | tuple[str, ...]:
        return value if isinstance(value, str) else tuple(value)

    layers = config.get("layers_to_transform", [])
    return TargetRule(
        names(config["target_modules"]),
        names(config.get("exclude_modules", [])),
        tuple(layers) if isinstance(layers, list) else (layers,),
        _tuple(config.get("layers_pattern")),
    )


@pytest.mark.parametrize("config", RULES, ids=str)
def test_selection_equals_peft(config: dict[str, Any]) -> None:
    peft_config = LoraConfig(**config)
    rule = _rule(config)
    for path in PATHS:
        assert rule.selects(path) == bool(check_target_module_exists(peft_config, path)), path


@pytest.mark.parametrize(
    "patterns",
    [
        {"q_proj": 1},
        {"_proj": 1},
        {"proj": 1, ".*": 2},
        {r"layers\.1\..*": 1, "v_proj": 2},
        {"v_proj": 2, r"layers\.1\..*": 1},
        {"^model.layers.0.self_attn.q_proj": 1},
        {"q_proj|v_proj": 1},
    ],
    ids=str,
)
def test_patterns_equal_peft(patterns: dict[str, int]) -> None:
    hits = 0
    for path in PATHS:
        expected = patterns.get(get_pattern_key(list(patterns), path), 99)
        assert find_pattern(patterns, path, 99, PatternMatcher()) == expected, path
        hits += expected != 99
    assert hits > 0 or patterns == {"_proj": 1} or "proj" in patterns


def test_layers_read_as_ranges() -> None:
    assert format_layers([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert format_layers([]) == ""
