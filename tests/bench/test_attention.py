"""`bench attention` on a tiny grid: what is counted and compared. Times are never asserted."""

from __future__ import annotations

import json

import pytest
import torch

from precache.bench.attention.measure import AttentionConfig, AttentionReport, bench_attention
from precache.bench.attention.methods import make_method
from precache.bench.attention.points import Heads, Point, make_problem, parse_heads
from precache.cli.main import main
from precache.errors import ConfigError
from precache.ops import BackendUnavailableError, ValueStrip, choose_backend, native

FASTEST = choose_backend("auto", torch.device("cpu"), torch.float32)
METHODS = tuple(dict.fromkeys((FASTEST, "cpu", "sdpa", "sdpa+expand")))
TINY = Heads(4, 2, 16)


@pytest.fixture(scope="module")
def report() -> AttentionReport:
    config = AttentionConfig(
        heads=(TINY,), contexts=(40, 80), ranks=(4,), prefill=8, longest_prefill=40, repeats=2
    )
    return bench_attention(config)


def test_every_method_is_measured_at_every_point(report: AttentionReport) -> None:
    prefill_dtypes = {row.dtype for row in report.rows if row.kind == "prefill"}
    found = [(row.kind, row.dtype, row.context, row.method) for row in report.rows]
    decode = [
        ("decode", dtype, context, method)
        for dtype in ("float32", "bfloat16")
        for context in (40, 80)
        for method in METHODS
    ]
    prefill = [
        ("prefill", dtype, 40, method)
        for dtype in ("float32", "bfloat16")
        if dtype in prefill_dtypes
        for method in METHODS
    ]
    assert found == decode + prefill
    assert "float32" in prefill_dtypes
    assert "prefill at contexts beyond 40" in report.left_out
    assert ("bfloat16" in prefill_dtypes) != any("emulates" in text for text in report.left_out)


def test_times_rates_and_ratios_belong_together(report: AttentionReport) -> None:
    for row in report.rows:
        assert 0 < row.wall_s.low <= row.wall_s.median <= row.wall_s.high
        ceiling = report.ceilings[row.dtype]
        assert row.of_gemm == pytest.approx(row.operations_per_s / ceiling.operations_per_s)
        assert row.of_copy == pytest.approx(row.bytes_per_s / ceiling.bytes_per_s)
        assert set(row.speedup) == {"sdpa", "sdpa+expand"} - {row.method}
        assert all(0 < found.low <= found.high for found in row.speedup.values())
        assert row.error < (2e-5 if row.dtype == "float32" else 0.02)


def test_work_is_counted_by_hand() -> None:
    decode = Point(Heads(4, 2, 16), 10, 1, 3, torch.bfloat16)
    assert decode.operations == 4 * 4 * 16 * 10
    assert decode.bytes_read == 10 * (2 * 2 * 16 + 3) * 2
    prefill = Point(Heads(4, 2, 16), 10, 3, 3, torch.float32)
    assert prefill.operations == 4 * 4 * 16 * (8 + 9 + 10)
    assert (decode.kind, prefill.kind) == ("decode", "prefill")


@pytest.mark.parametrize("q_len", [1, 5])
def test_all_methods_compute_the_same_and_the_adapter_counts(q_len: int) -> None:
    problem = make_problem(Point(TINY, 30, q_len, 4, torch.float32), torch.device("cpu"), seed=1)
    outs = [make_method(name, problem)() for name in METHODS]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], atol=1e-5, rtol=1e-5)
    strip = problem.inputs.v_lora
    assert strip is not None
    without = problem._replace(
        inputs=problem.inputs._replace(v_lora=ValueStrip(strip.z, 0 * strip.b))
    )
    for name in ("cpu", "sdpa+expand"):
        assert (make_method(name, without)() - outs[0]).abs().max() > 0.01


def test_the_command_prints_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    grid = ["--contexts", "20", "--ranks", "2", "--prefill", "0", "--dtypes", "float32"]
    assert main(["bench", "attention", "--heads", "2/1/16", *grid, "--repeats", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["benchmark"] == "attention"
    assert [row["method"] for row in result["rows"]] == list(METHODS)
    assert result["rows"][0]["speedup"]["sdpa"]["median"] > 0
    assert result["ceilings"]["float32"]["bytes_per_s"] > 0
    assert main(["bench", "attention", "--heads", "2/1/16", *grid, "--repeats", "1"]) == 0
    assert "decode H2/KV1/d16 float32" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["32/8", "32/5/128", "0/0/64", "a/b/c", "32/8/128/1"])
def test_heads_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--heads"):
        parse_heads(text)


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"contexts": (0,)}, "--contexts"),
        ({"ranks": ()}, "--ranks"),
        ({"repeats": 0}, "--repeats"),
        ({"prefill": 1}, "--prefill"),
        ({"prefill": 50, "contexts": (40,)}, "--prefill"),
        ({"dtypes": ("int8",)}, "--dtypes"),
        ({"backends": ("magic",)}, "--backends"),
    ],
)
def test_a_grid_that_means_nothing_is_refused(changes: dict[str, object], option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        AttentionConfig(**changes)


def test_a_backend_that_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "obstacle", lambda *_: "it was not compiled")
    choose_backend.cache_clear()
    settings = {"contexts": (20,), "ranks": (2,), "prefill": 0, "repeats": 1}
    with pytest.raises(BackendUnavailableError, match="'native' cannot be used: it was not"):
        bench_attention(AttentionConfig(heads=(TINY,), backends=("native",), **settings))
    choose_backend.cache_clear()
