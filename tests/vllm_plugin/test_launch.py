"""The command line of vLLM's server, as `precache serve --engine vllm` prints it."""

from __future__ import annotations

import importlib
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from precache.cli.main import main
from precache.vllm_plugin.guard import KeyGuard
from precache.vllm_plugin.launch import GUARD
from tests.reference.lora import QKVO, make_adapter


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    assert main(["serve", *argv, "--engine", "vllm", "--print-command"]) == 0
    return shlex.split(capsys.readouterr().out)


def values(command: list[str], flag: str) -> list[str]:
    """The values behind a flag."""
    rest = command[command.index(flag) + 1 :]
    return rest[: next((i for i, part in enumerate(rest) if part.startswith("--")), len(rest))]


def test_the_command_holds_all_that_the_plugin_needs(
    model: str, adapters: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    named = [f"{name}={path}" for name, path in adapters["qv"].items()]
    command = printed(
        capsys,
        *(model, "--policy", "rebaseshared", "--port", "8123", "--cache-memory", "1MiB"),
        *(part for pair in named for part in ("--adapter", pair)),
    )
    assert command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert values(command, "--model") == [model]
    assert values(command, "--served-model-name") == [Path(model).name]  # as the embedded engine
    assert values(command, "--lora-modules") == named
    assert values(command, "--max-loras") == ["3"]
    assert values(command, "--max-lora-rank") == ["8"]  # the next that vLLM takes after rank 4
    assert values(command, "--lora-target-modules") == ["q_proj", "v_proj"]
    assert values(command, "--host") == ["127.0.0.1"]
    assert values(command, "--port") == ["8123"]
    assert values(command, "--kv-cache-memory-bytes") == [str(1 << 20)]
    config = json.loads(values(command, "--additional-config")[0])
    assert config == {"precache": {"policy": "rebaseshared"}}


def test_flags_after_the_dashes_are_vllms_and_come_last(
    model: str, adapters: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = f"plan={adapters['qv']['plan']}"
    argv = ["serve", model, "--engine", "vllm", "--print-command", "--adapter", adapter]
    assert main([*argv, "--", "--max-loras", "5", "--seed", "1"]) == 0
    command = shlex.split(capsys.readouterr().out)
    assert command[-4:] == ["--max-loras", "5", "--seed", "1"]


def test_keys_close_every_path_and_stay_off_the_command_line(
    model: str, adapters: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = f"plan={adapters['qv']['plan']}"
    argv = ["serve", model, "--engine", "vllm", "--adapter", adapter, "--host", "0.0.0.0"]
    argv += ["--api-key", "first-key", "--api-key", "second-key"]
    started: list[Any] = []
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object())
    monkeypatch.setattr("os.execve", lambda *call: started.append(call))
    monkeypatch.setenv("VLLM_API_KEY", "another")
    main([*argv, "--", "--middleware", "their.Own"])
    ((_, command, environment),) = started
    assert shlex.split(capsys.readouterr().out) == command
    assert command[-4:] == ["--middleware", "their.Own", "--middleware", GUARD]
    assert not [part for part in command if "-key" in part]
    assert environment["PRECACHE_API_KEY"] == "first-key,second-key"
    assert "VLLM_API_KEY" not in environment
    module, name = GUARD.rsplit(".", 1)
    assert getattr(importlib.import_module(module), name) is KeyGuard


def test_an_open_server_has_no_guard(
    model: str, adapters: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command = printed(capsys, model, "--adapter", f"plan={adapters['qv']['plan']}")
    assert "--middleware" not in command


@pytest.mark.parametrize(
    "passed_on", [["--host", "0.0.0.0"], ["--hos=::"], ["--api-key", "k"], ["--api_key=k"]]
)
def test_host_and_key_belong_before_the_dashes(
    passed_on: list[str], model: str, adapters: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = f"plan={adapters['qv']['plan']}"
    argv = ["serve", model, "--engine", "vllm", "--print-command", "--adapter", adapter]
    assert main([*argv, "--", *passed_on]) == 2
    assert "before --" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--api-key", "short"], "--api-key"),
        (["--api-key", "one-key,two-keys"], "commas"),
        (["--policy", "baseshared"], "baseshared"),
        (["--schedule", "lazy-prefill"], "--schedule"),
        (["--admin-key", "0123456789"], "--admin-key"),
        (["--max-queue", "3"], "--max-queue"),
        (["--host", "0.0.0.0"], "--host"),
        (["--device", "cuda"], "--device"),
    ],
)
def test_what_vllm_cannot_do_is_refused(
    options: list[str], named: str, model: str, adapters: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = f"plan={adapters['qv']['plan']}"
    argv = ["serve", model, "--engine", "vllm", "--print-command", "--adapter", adapter]
    assert main([*argv, *options]) == 2
    captured = capsys.readouterr()
    assert named in captured.err
    assert captured.out == ""


def test_key_lora_is_refused_before_anything_starts(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_adapter(model, tmp_path / "keyed", targets=QKVO)
    argv = ["serve", model, "--engine", "vllm", "--print-command", "--adapter", f"plan={folder}"]
    assert main(argv) == 2
    assert "k_proj" in capsys.readouterr().err
    assert main([*argv, "--policy", "fullshared"]) == 0


def test_arguments_after_the_dashes_need_the_vllm_engine(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", model, "--", "--seed", "1"]) == 2
    assert "--engine vllm" in capsys.readouterr().err


def test_vllm_must_be_there_and_load_the_plugin(
    model: str, adapters: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = f"plan={adapters['qv']['plan']}"
    argv = ["serve", model, "--engine", "vllm", "--adapter", adapter]
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert main(argv) == 2
    assert "docs/vllm.md" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object())
    monkeypatch.setenv("VLLM_PLUGINS", "none")
    assert main(argv) == 2
    assert "VLLM_PLUGINS" in capsys.readouterr().err
