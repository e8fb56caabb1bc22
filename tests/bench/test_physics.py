"""The formulas against products of matrices that a real pass runs, and against numbers by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig

from precache import Engine
from precache.bench.adapters import agent_names, write_random_adapters
from precache.bench.physics import (
    METHODS,
    LoraSize,
    ModelSize,
    adapted_flops,
    bytes_per_token,
    decode_bytes,
    predict,
    prefill_flops,
)
from precache.bench.shapes import model_config
from precache.bench.trace import Step, Trace, controlled_trace
from precache.fidelity.cost import CostMeter
from tests.reference.models import save_tiny

LLAMA = ModelSize.of(model_config("llama-3.1-8b"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny("llama", tmp_path_factory.mktemp("physics") / "model", num_layers=8))


@pytest.mark.parametrize("policy", ["nonshared", "fullshared", "prelrshared"])
def test_a_prefill_costs_what_a_meter_counts(model: str, policy: str, tmp_path: Path):
    engine = Engine.load(model, policy=policy, dtype="float32")
    folders = write_random_adapters(engine.model.shape, agent_names(3), tmp_path, 0)
    for name, path in folders.items():
        engine.add_adapter(name, path)
    prompt = [5 + index % 90 for index in range(200)]
    engine.generate("plan", prompt[:100], max_tokens=1)
    with CostMeter(engine) as meter:
        engine.generate("plan", prompt, max_tokens=1)
    counted = meter.cost().flops
    size = ModelSize.of(AutoConfig.from_pretrained(model))
    # Of the last layer the engine runs most rows for k and v only.
    low, high = (by_formula(replace(size, layers=layers), policy) for layers in (7, 8))
    assert low < counted < low + 0.5 * (high - low)
    # Without its low-rank parts the formula would miss.
    assert prefill_flops(replace(size, layers=7), 100, 100) < 0.97 * low


def by_formula(size: ModelSize, policy: str) -> float:
    """100 tokens behind 100."""
    return adapted_flops(size, LoraSize(3), METHODS[policy], 100, 100)


def test_eight_billion_parameters_by_hand():
    assert LLAMA.layers * LLAMA.row == pytest.approx(6.98e9, rel=1e-3)
    assert LLAMA.weights == pytest.approx(7.5e9, rel=1e-2)
    lora = LoraSize(3)
    assert bytes_per_token(LLAMA, lora, METHODS["fullshared"], 2) == 131_072
    assert bytes_per_token(LLAMA, lora, METHODS["nonshared"], 2) == 3 * 131_072
    assert bytes_per_token(LLAMA, lora, METHODS["prelrshared"], 2) == 131_072 + 1_536
    step = decode_bytes(LLAMA, lora, METHODS["prelrshared"], 1000, 2)
    assert step == 2 * LLAMA.weights + 1000 * (131_072 + 512)  # its own strip only


def test_a_trace_is_the_sum_of_its_turns():
    trace = Trace((Step("plan", 100, 5), Step("action", 10, 5)))
    lora = LoraSize(2)

    def ttft(policy: str) -> float:
        return predict(LLAMA, lora, METHODS[policy], trace, 2).ttft_flops

    none, full, pre = METHODS["nonshared"], METHODS["fullshared"], METHODS["prelrshared"]
    assert ttft("nonshared") == adapted_flops(LLAMA, lora, none, 100, 0) + adapted_flops(
        LLAMA, lora, none, 115, 0
    )
    # 105 tokens before the second turn, the last of which is run by it.
    assert ttft("fullshared") == adapted_flops(LLAMA, lora, full, 100, 0) + adapted_flops(
        LLAMA, lora, full, 11, 104
    )
    assert ttft("prelrshared") == adapted_flops(LLAMA, lora, pre, 100, 0) + adapted_flops(
        LLAMA, lora, pre, 11, 104
    )
    neutral = predict(LLAMA, lora, METHODS["rebaseshared"], trace, 2).neutral_flops
    assert neutral == prefill_flops(LLAMA, 104, 0) + prefill_flops(LLAMA, 15, 104)


def test_order_of_the_methods_on_the_trace_of_the_paper():
    trace = controlled_trace(16_384, agent_names(3))
    cost = {
        name: predict(LLAMA, LoraSize(3), method, trace, 2).ttft_flops
        for name, method in METHODS.items()
    }
    assert cost["fullshared"] < cost["prelrshared"] < 1.02 * cost["fullshared"]
    assert 2.5 * cost["fullshared"] < cost["nonshared"] < 3.02 * cost["fullshared"]
    assert cost["prelrshared"] < cost["baseshared"]
