"""`bench serving` against a real server."""

from __future__ import annotations

from typing import Any

import pytest

from precache.bench.serving import ServingConfig, bench_serving
from tests.vllm_plugin.engines import VLLM

pytestmark = VLLM


def test_a_row_holds_what_the_server_did(
    model: str, adapters: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    config = ServingConfig(
        model=model,
        adapters=adapters["qv"],
        rows=("prelrshared",),
        qps=(50.0,),
        chunk=40,
        rounds=1,
        trajectories=2,
        dtype="float32",
        cache_memory="64MiB",
    )
    (row,) = bench_serving(config)
    trace = config.trace()
    assert row.requests == 2 * len(trace.steps)
    assert row.throughput_ratio is None
    # every turn after the first finds all whole blocks of the trajectory before it
    assert 0.7 < row.cached_tokens / row.prompt_tokens < 1
    whole = trace.tokens / 32
    assert whole < row.kv_blocks_filled < whole + len(trace.steps)
    assert 0 < row.ttft_p50_s <= row.ttft_p90_s <= row.trajectory_latency_p90_s
