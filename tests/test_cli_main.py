"""The command line: help at once, errors in one line, exit codes, and `generate` against a scripted engine."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import precache
from precache.cli import main as cli
from precache.cli.generate import sampling_from_args
from precache.cli.options import adapter_pair, adapters_from_args, add_engine_options
from precache.errors import ConfigError, PrecacheError, SamplingParamsError
from precache.request import GenerationChunk, GenerationOutput, SamplingParams, Timings, Usage


def precache_command(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "precache", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def test_help_explains_every_command_with_an_example() -> None:
    text = precache_command("--help").stdout
    for name, command in cli.COMMANDS.items():
        assert command.summary in text
        assert command.example in text
        assert command.example.startswith(f"precache {name}")


def test_help_is_fast() -> None:
    # Processor time, so that a busy machine does not count against it.
    def seconds(*args: str) -> float:
        before = os.times()
        subprocess.run([sys.executable, *args], capture_output=True, check=True)
        after = os.times()
        return (after.children_user - before.children_user) + (
            after.children_system - before.children_system
        )

    assert min(seconds("-m", "precache", "--help") - seconds("-c", "") for _ in range(5)) < 0.3


def test_version() -> None:
    assert precache_command("--version").stdout == f"precache {precache.__version__}\n"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_its_own_help_with_an_example(name: str, capsys: Any) -> None:
    parser = cli.build_parser([name])
    with pytest.raises(SystemExit) as ended:
        parser.parse_args([name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "--json" in text
    assert re.search(rf"^example.*:\n.*^  .*precache {name}", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("argv", [[], ["fly"], ["--fly"]])
def test_an_unknown_command_lists_the_known(argv: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "generate" in error or "COMMAND" in error


def install_command(monkeypatch: pytest.MonkeyPatch, outcome: int | BaseException) -> None:
    def run(args: argparse.Namespace) -> int:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    module = ModuleType("precache.cli.demo")
    module.add_parser = lambda commands: commands.add_parser("demo").set_defaults(func=run)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "precache.cli.demo", module)


@pytest.mark.parametrize(
    ("outcome", "status", "error"),
    [
        (0, 0, ""),
        (3, 3, ""),
        (PrecacheError("no such adapter"), 2, "error: no such adapter\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_how_a_command_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, outcome: Any, status: int, error: str
) -> None:
    install_command(monkeypatch, outcome)
    assert cli.main(["demo"]) == status
    assert capsys.readouterr().err == error


@pytest.mark.parametrize(("given", "used"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_sleep_while_they_wait_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: str | None, used: str
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")  # so that it is put back afterwards
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    install_command(monkeypatch, 0)
    cli.main(["demo"])
    assert os.environ["OMP_WAIT_POLICY"] == used


def test_our_own_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    install_command(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        cli.main(["demo"])


# -- shared options --------------------------------------------------------------------------------------------------


def engine_args(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    return parser.parse_args(["smollm2", *argv])


def test_adapters_keep_their_names_and_paths() -> None:
    args = engine_args("--adapter", "plan=a/plan", "--adapter", "act=b=c")
    assert adapters_from_args(args) == {"plan": Path("a/plan"), "act": Path("b=c")}


@pytest.mark.parametrize("text", ["plan", "=a", "plan=", ""])
def test_an_adapter_needs_name_and_folder(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="NAME=FOLDER"):
        adapter_pair(text)


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="each name once"):
        adapters_from_args(engine_args("--adapter", "a=x", "--adapter", "a=y"))


# -- generate --------------------------------------------------------------------------------------------------------


class ScriptedEngine:
    """Stands in for Engine: remembers how it was called and streams two pieces."""

    calls: dict[str, Any]

    @classmethod
    def load(cls, model: str, **settings: Any) -> ScriptedEngine:
        engine = cls()
        engine.calls = {"model": model, **settings}
        cls.last = engine  # type: ignore[attr-defined]
        return engine

    def stream(
        self, agent: str, prompt: Any, *, params: SamplingParams
    ) -> Iterator[GenerationChunk]:
        self.calls |= {"agent": agent, "prompt": prompt, "params": params}
        output = GenerationOutput(
            agent, "s", (1,), (2, 3), "hello", "stop", Usage(1, 2, 0), Timings(0.1, 0.2)
        )
        yield GenerationChunk("hel", (2,))
        yield GenerationChunk("lo", (3,), (), output)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedEngine]:
    monkeypatch.setattr(precache, "Engine", ScriptedEngine, raising=False)
    return ScriptedEngine


def test_generate_streams_text_and_reports_on_stderr(
    scripted: type[ScriptedEngine], capsys: Any
) -> None:
    options = ["--adapter", "plan=a", "--policy", "nonshared", "--stop", "\\nObs", "--seed", "0"]
    assert cli.main(["generate", "m", *options, "--prompt", "Q", "--cache-memory", "1GiB"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "hello\n"
    assert "ended by stop" in captured.err
    assert scripted.last.calls == {  # type: ignore[attr-defined]
        "model": "m",
        "adapters": {"plan": Path("a")},
        "policy": "nonshared",
        "cache_memory": "1GiB",
        "agent": "plan",
        "prompt": "Q",
        "params": SamplingParams(seed=0, stop=("\nObs",)),
    }


@pytest.mark.usefixtures("scripted")
def test_generate_json_is_one_object_on_the_last_line(capsys: Any) -> None:
    assert cli.main(["generate", "m", "--prompt", "Q", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["agent"], report["text"], report["finish_reason"]) == ("base", "hello", "stop")
    assert report["usage"]["cached_tokens"] == 0


def test_generate_sends_a_file_as_a_user_message(
    scripted: type[ScriptedEngine], tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("a question\n", encoding="utf-8")
    assert cli.main(["generate", "m", "--prompt-file", str(file), "--chat"]) == 0
    expected = [{"role": "user", "content": "a question\n"}]
    assert scripted.last.calls["prompt"] == expected  # type: ignore[attr-defined]


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--adapter", "a=x", "--adapter", "b=y", "--prompt", "Q"], "--agent: got None"),
        (["--prompt-file", "/does/not/exist"], "--prompt-file: got '/does/not/exist'"),
        (["--prompt", "Q", "--top-p", "0"], "top_p: got 0.0"),
    ],
)
def test_generate_refuses_in_one_line(options: list[str], error: str, capsys: Any) -> None:
    assert cli.main(["generate", "m", *options]) == 2
    assert capsys.readouterr().err.startswith(f"error: {error}")


def test_options_left_out_keep_the_defaults_of_sampling_params() -> None:
    args = cli.build_parser(["generate"]).parse_args(["generate", "m", "--prompt", "Q"])
    assert sampling_from_args(args) == SamplingParams()
    args.max_tokens = 0
    with pytest.raises(SamplingParamsError):
        sampling_from_args(args)


def test_a_reader_that_closes_early_is_no_error(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        "import sys, types\n"
        "from precache.cli import main as cli\n"
        "module = types.ModuleType('precache.cli.demo')\n"
        "def run(args):\n"
        "    for _ in range(100_000): print('a long line of text')\n"
        "    return 0\n"
        "module.add_parser = lambda commands: commands.add_parser('demo').set_defaults(func=run)\n"
        "sys.modules['precache.cli.demo'] = module\n"
        "sys.exit(cli.main(['demo']))\n"
    )
    command = f"{sys.executable} {script} | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--recompute-share", "0.5"], "--recompute-share: got 0.5, allowed is only with a policy"),
        (["--recompute-again", "--policy", "prelrshared"], "--recompute-again: got True, allowed"),
        (
            ["--recompute-seed", "1", "--policy", "cacheblend"],
            "reads it: random-layers, random-tokens",
        ),
        (["--calibration", "x", "--policy", "droidspeak"], "that reads it: calibrated"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "serve", "compare", "agents"])
def test_a_setting_that_no_chosen_policy_reads_is_refused(
    command: str,
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    line = {
        "generate": ["/nowhere", "--prompt", "x"],
        "serve": ["/nowhere"],
        "compare": ["/nowhere", "--trajectories", str(tmp_path)],
        "agents": ["scienceqa", "--data", str(tmp_path)],
    }[command]
    if command == "compare":
        options = [option.replace("--policy", "--policies") for option in options]
    assert cli.main([command, *line, *options]) == 2
    assert message in capsys.readouterr().err
