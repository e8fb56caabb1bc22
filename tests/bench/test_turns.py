"""`bench turns` on a tiny model: what is counted, and that the stock row computes what nonshared does.

Timings are never asserted, only that they were taken.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from precache import Engine
from precache.bench.adapters import write_random_adapters
from precache.bench.guard import GuardError
from precache.bench.player import EnginePlayer, Player, play_trace
from precache.bench.stock import StockPlayer
from precache.bench.summary import RowKey
from precache.bench.trace import Step, Trace
from precache.bench.turns import TurnsConfig, TurnsReport, bench_turns
from precache.cli.main import main
from precache.errors import ConfigError, UnknownPolicyError
from tests.reference.lora import make_adapter
from tests.reference.models import VOCAB_SIZE, save_tiny

AGENTS = ("plan", "action", "reflect")
SHORT = Trace(
    (Step("plan", 20, 6), Step("action", 3, 4), Step("plan", 5, 4), Step("reflect", 1, 3))
)
TOKENS = {"vocab_size": VOCAB_SIZE, "seed": 3}
ROWS = tuple(
    RowKey(*row)
    for row in [
        ("stock-peft",),
        ("nonshared",),
        ("fullshared",),
        ("prelrshared",),
        ("rebaseshared", "lazy-prefill"),
    ]
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny("llama", tmp_path_factory.mktemp("bench") / "model", num_layers=1))


@pytest.fixture(scope="module")
def adapters(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: make_adapter(model, root / name, seed=seed) for seed, name in enumerate(AGENTS, 1)
    }


@pytest.fixture(scope="module")
def report(model: str, adapters: dict[str, Path]) -> TurnsReport:
    return bench_turns(
        TurnsConfig(
            model, chunks=(16,), rows=ROWS, adapters=adapters, rounds=1, repeats=2, dtype="float32"
        )
    )


def stock_player(model: str, adapters: dict[str, Path]) -> StockPlayer:
    return StockPlayer(model, adapters, dtype=torch.float32, device=torch.device("cpu"))


def engine_player(model: str, adapters: dict[str, Path], policy: str) -> EnginePlayer:
    return EnginePlayer(Engine.load(model, adapters, policy=policy, dtype="float32"))


def test_stock_says_what_nonshared_says(model: str, adapters: dict[str, Path]):
    stock = play_trace(stock_player(model, adapters), SHORT, **TOKENS)
    ours = play_trace(engine_player(model, adapters, "nonshared"), SHORT, **TOKENS)
    shared = play_trace(engine_player(model, adapters, "fullshared"), SHORT, **TOKENS)
    assert stock.outputs == ours.outputs != shared.outputs
    assert stock.work.prefilled == ours.work.prefilled > shared.work.prefilled


def test_a_run_counts_what_it_ran(model: str, adapters: dict[str, Path]):
    run = play_trace(engine_player(model, adapters, "rebaseshared"), SHORT, **TOKENS)
    last_tokens = len(SHORT.steps) - 1  # a turn's last token is run by the next turn
    assert run.work.prefilled == SHORT.prompt_tokens + last_tokens
    assert run.work.neutral == SHORT.tokens - 1
    assert run.decoded == SHORT.output_tokens - 2 * len(SHORT.steps)
    assert 0 < run.ttft_s < run.wall_s


def test_what_is_recomputed_is_counted(model: str, adapters: dict[str, Path]):
    every_layer = {"policy": "droidspeak", "recompute_share": 1.0, "dtype": "float32"}
    player = EnginePlayer(Engine.load(model, adapters, **every_layer))
    layers = player.engine.model.shape.num_layers
    run = play_trace(player, SHORT, **TOKENS)
    shared = play_trace(engine_player(model, adapters, "fullshared"), SHORT, **TOKENS)
    assert run.work.refreshed_kv_entries == layers * run.work.catch_up > 0
    assert run.work.flops == shared.work.flops + run.work.catch_up_flops > shared.work.flops
    assert shared.work.refreshed_kv_entries == shared.work.catch_up == 0


def test_every_run_starts_from_an_empty_cache(model: str, adapters: dict[str, Path]):
    players: list[Player] = [
        stock_player(model, adapters),
        engine_player(model, adapters, "prelrshared"),
    ]
    for player in players:
        first, second = (play_trace(player, SHORT, **TOKENS) for _ in range(2))
        assert first.work.prefilled == second.work.prefilled
        assert first.outputs == second.outputs
        assert first.cache_bytes == second.cache_bytes
        assert first.cache_bytes.peak > 0


def test_rows_hold_every_policy_with_its_counts(report: TurnsReport):
    rows = {row.policy: row for row in report.rows}
    assert [RowKey(row.policy, row.schedule) for row in report.rows] == list(ROWS)
    assert rows["stock-peft"].same_tokens_as_nonshared == 1.0
    assert rows["fullshared"].same_tokens_as_nonshared != 1.0
    prefilled = {policy: row.tokens_prefilled for policy, row in rows.items()}
    assert prefilled["stock-peft"] == prefilled["nonshared"] > 2 * prefilled["fullshared"]
    assert prefilled["fullshared"] == prefilled["prelrshared"] == prefilled["rebaseshared"]
    assert rows["rebaseshared"].neutral_tokens == rows["rebaseshared"].trace_tokens - 1
    cached = {policy: row.peak_cache_bytes for policy, row in rows.items()}
    assert cached["fullshared"] < cached["prelrshared"] < cached["nonshared"]
    assert set(report.guard) == {"stock-peft"}
    assert report.guard["stock-peft"] < 1e-4


def test_ratios_are_taken_within_a_repeat(report: TurnsReport):
    for row in report.rows:
        assert set(row.ttft_ratio) == {"stock-peft", "nonshared", "fullshared"}
        assert row.spread["total_ttft_s"].low <= row.total_ttft_s <= row.spread["total_ttft_s"].high
        if row.policy in row.ttft_ratio:
            for ratios in (
                row.ttft_ratio,
                row.decode_ratio,
                row.ttft_cpu_ratio,
                row.decode_cpu_ratio,
            ):
                own = ratios[row.policy]
                assert own.low == own.median == own.high == 1.0


def test_guard_stops_a_bench_whose_rows_differ(
    model: str, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    logits = StockPlayer.logits
    monkeypatch.setattr(StockPlayer, "logits", lambda *args: logits(*args) * 1.1)
    with pytest.raises(GuardError, match=r"stock-peft and nonshared differ at turn 0 \(plan\)"):
        bench_turns(TurnsConfig(model, rows=ROWS, adapters=adapters, dtype="float32"))


def test_random_adapters_load_and_change_the_output(model: str, tmp_path: Path):
    engine = Engine.load(model, policy="nonshared", dtype="float32")
    written = write_random_adapters(engine.model.shape, AGENTS, tmp_path, seed=0)
    for name, path in written.items():
        engine.add_adapter(name, path)
    logits = [engine.score(agent, [5, 6, 7], [8]) for agent in ("base", *AGENTS)]
    assert len({tensor.sum().item() for tensor in logits}) == 4
    with pytest.raises(FileExistsError):
        write_random_adapters(engine.model.shape, AGENTS, tmp_path, seed=0)


def run_json(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main(["bench", "turns", "--json", *options]) == 0
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def test_json_is_the_last_line_and_says_how_it_was_made(
    model: str, capsys: pytest.CaptureFixture[str]
):
    found = run_json(
        capsys, "--model", model, "--chunk", "16,24", "--repeats", "1", "--rounds", "1", "--agents", "4",
        "--policies", "prelrshared,rebaseshared", "--schedule", "lazy-prefill,double-batch",
        "--dtype", "float32", "--seed", "7",
    )  # fmt: skip
    assert {"command", "commit", "machine", "versions", "settings", "guard", "rows"} <= set(found)
    assert found["settings"]["agents"] == [["plan", "action", "action2", "reflect"]]
    assert (found["settings"]["seed"], found["settings"]["dtype"]) == (7, "float32")
    names = [(row["chunk"], row["policy"], row["schedule"]) for row in found["rows"]]
    policies = [
        ("stock-peft", None),
        ("prelrshared", None),
        ("rebaseshared", "lazy-prefill"),
        ("rebaseshared", "double-batch"),
    ]
    assert names == [(chunk, *policy) for chunk in (16, 24) for policy in policies]
    wanted = {"agents", "total_ttft_s", "tokens_per_s", "decode_tokens_per_s", "neutral_s"}
    wanted |= {"tokens_prefilled", "peak_cache_bytes"}
    assert all(wanted <= set(row) and row["total_ttft_s"] > 0 for row in found["rows"])


def test_table_without_stock(model: str, capsys: pytest.CaptureFixture[str]):
    options = ["--model", model, "--chunk", "16", "--repeats", "1", "--rounds", "1", "--no-stock"]
    assert main(["bench", "turns", *options, "--policies", "fullshared,prelrshared"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("chunk 16: ")
    assert [line.split()[0] for line in lines[3:6]] == ["policy", "fullshared", "prelrshared"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--chunk", "12,x"], "--chunk: got '12,x', allowed is comma-separated integers"),
        (["--chunk", "0"], "--chunk: got [0], allowed is lengths of at least 1 token"),
        (["--repeats", "0"], "--repeats: got 0, allowed is an integer of at least 1"),
        (["--rounds", "0"], "--rounds: got 0, allowed is an integer of at least 1"),
        (["--agents", "3,0"], "--agents: got [3, 0], allowed is integers of at least 1"),
        (["--agents", "x"], "--agents: got 'x', allowed is comma-separated integers"),
        (["--length", "100"], "--length: got [100], allowed is 916 tokens or more for 3 agents"),
        (["--shared", "1.5"], "--shared: got [1.5], allowed is shares between 0 and 1"),
        (["--shared", "half"], "--shared: got 'half', allowed is comma-separated numbers"),
        (["--targets", "kv"], "--targets: got 'kv', allowed is one of ['all', 'qkvo', 'qv']"),
        (["--rank", "0"], "--rank: got 0, allowed is an integer of at least 1"),
        (["--adapter", "a=/a", "--rank", "4"], "--rank: got 4, allowed is without --adapter only"),
        (["--think", "-1"], "--think: got -1.0, allowed is seconds, 0 or more"),
        (["--policies", ","], "--policies: got ',', allowed is comma-separated names"),
        (["--policies", "shared"], "unknown policy: got 'shared', allowed are"),
        (["--schedule", "later"], "unknown schedule: got 'later', allowed are"),
        (["--adapter", "a=/a", "--agents", "3"], "--agents: got '3', allowed is 1"),
    ],
)
def test_bad_options_fail_before_anything_is_loaded(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["bench", "turns", "--model", "/nowhere", *options]) == 2
    assert message in capsys.readouterr().err


def test_cases_are_agents_times_lengths_times_shares(
    model: str, capsys: pytest.CaptureFixture[str]
):
    found = run_json(
        capsys, "--model", model, "--length", "720", "--repeats", "1", "--rounds", "1", "--agents", "3,5",
        "--shared", "1,0.25", "--decode", "4", "--policies", "nonshared,fullshared,prelrshared",
        "--rank", "2", "--targets", "qkvo", "--dtype", "float32", "--no-stock",
    )  # fmt: skip
    assert (found["settings"]["targets"], found["settings"]["rank"]) == ("qkvo", 2)
    rows = {(row["agents"], row["shared"], row["policy"]): row for row in found["rows"]}
    assert len(rows) == len(found["rows"]) == 2 * 2 * 3
    assert {row["trace_tokens"] for row in rows.values()} == {720}
    for agents in (3, 5):
        ran = {key[1:]: row["tokens_prefilled"] for key, row in rows.items() if key[0] == agents}
        # A cache of one's own does not care what others see; a shared one reuses what is common.
        assert ran[1.0, "nonshared"] == ran[0.25, "nonshared"] > ran[0.25, "fullshared"]
        assert ran[0.25, "fullshared"] == ran[0.25, "prelrshared"] > 2 * ran[1.0, "fullshared"]
    three, five = (rows[agents, 1.0, "prelrshared"] for agents in (3, 5))
    assert five["base_bytes"] == three["base_bytes"] == rows[3, 1.0, "fullshared"]["base_bytes"]
    assert 3 * five["strip_bytes"] == 5 * three["strip_bytes"] > 0
    assert three["peak_cache_bytes"] == three["base_bytes"] + three["strip_bytes"]


def test_config_refuses_what_cannot_be_measured():
    with pytest.raises(ConfigError, match="--policies"):
        TurnsConfig()
    with pytest.raises(UnknownPolicyError):
        TurnsConfig(rows=(RowKey("prelrshared", "lazy-prefill"),))
