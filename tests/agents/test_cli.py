"""`precache agents` from end to end on a tiny model: a user's own workflow, resume, forced mode, mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from precache import Engine
from precache.cli.main import main
from precache.errors import ConfigError
from tests.reference.lora import make_adapter
from tests.reference.models import save_tiny

WORKFLOW = """
name: pair
header: "Task: {question}\\n"
start: draft
turns:
  draft: {role: writer, cue: "D{step}:", writes: answer, max_tokens: 4, next: remark}
  remark: {role: critic, cue: "R{step}:", max_tokens: 4, next: end}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agents")
    save_tiny("llama", folder / "model")
    for seed, role in enumerate(("writer", "critic")):
        make_adapter(folder / "model", folder / role, seed=seed)
    (folder / "pair.yaml").write_text(WORKFLOW)
    rows = [{"id": n, "question": f"Say {n}.", "answer": str(n)} for n in range(2)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def agents(folder: Path, *options: str, out: str = "out.jsonl") -> int:
    """Run the command on the tiny model, over the questions unless recorded episodes are given."""
    roles = [x for r in ("writer", "critic") for x in ("--adapter", f"{r}={folder / r}")]
    data = [] if "--recorded" in options else ["--data", str(folder / "tasks.jsonl")]
    return main(
        ["agents", str(folder / "pair.yaml"), *data, *roles]
        + ["--model", str(folder / "model"), "--dtype", "float32"]
        + ["--out", str(folder / out), "--json", *options]
    )


def test_policies_side_by_side_then_resumed_then_forced(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert agents(folder, "--policies", "nonshared,prelrshared") == 0
    text = capsys.readouterr().out
    rows = json.loads(text.splitlines()[-1])["rows"]
    assert [(row["policy"], row["episodes"]) for row in rows] == [
        ("nonshared", 2),
        ("prelrshared", 2),
    ]
    assert rows[1]["cached_share"] > rows[0]["cached_share"]
    assert "em" in rows[1]["drops"]
    lines = (folder / "out.jsonl").read_text()
    assert agents(folder, "--policies", "nonshared,prelrshared") == 0
    assert (folder / "out.jsonl").read_text() == lines
    # Another dtype is another model under the same name.
    assert agents(folder, "--policies", "nonshared,prelrshared", "--dtype", "bfloat16") == 2
    assert (folder / "out.jsonl").read_text() == lines

    options = ["--mode", "forced", "--recorded", str(folder / "out.jsonl"), "--policies"]
    capsys.readouterr()
    assert agents(folder, *options, "nonshared,fullshared", out="forced.jsonl") == 0
    forced = json.loads(capsys.readouterr().out.splitlines()[-1])["forced"]
    assert [row["policy"] for row in forced] == ["nonshared", "fullshared"]
    assert forced[0]["nll"]["mean"] != forced[1]["nll"]["mean"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policies", "sharing"], "--policies: got 'sharing'"),
        (["--policies", "nonshared", "--policy", "nonshared"], "either --policy or --policies"),
        (["--limit", "0"], "--limit: got 0"),
        (["--repeats", "0"], "--repeats: got 0"),
        (["--temperature", "-1"], "--temperature: got -1.0"),
        (["--tool-timeout", "0"], "--tool-timeout: got 0.0"),
        (["--recorded", "out.jsonl"], "--data: got None"),
        (["--mode", "forced", "--temperature", "1"], "--temperature: got '1.0', allowed is none"),
        (
            ["--mode", "forced", "--data", ".", "--recorded", "x"],
            "either --recorded or --data in forced mode",
        ),
        (["--mode", "forced", "--recorded", "nowhere"], "nowhere cannot be read"),
        (["--base-url", "http://x/v1"], "--adapter: got 'writer, critic', allowed is none"),
        (["--api-key", "secret"], "--api-key: got 'a key', allowed is none without --base-url"),
        (["--model-name", "writer=w"], "--model-name: got 'writer', allowed is none"),
    ],
)
def test_mistakes_are_told_before_anything_is_loaded(
    options: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert agents(folder, *options, out="never.jsonl") == 2
    assert message in capsys.readouterr().err
    assert not (folder / "never.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("--model", "x"),
        ("--dtype", "x"),
        ("--schedule", "x"),
        ("--recompute-profile", "x"),
        ("--recompute-share", "0.0"),
        ("--calibration", "x"),
    ],
)
def test_an_endpoint_takes_no_options_of_an_engine(
    name: str, value: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(folder / "tasks.jsonl")
    assert main(["agents", "writer_critic", "--data", data, "--base-url", "u", name, value]) == 2
    assert f"{name}: got '{value}', allowed is none with --base-url" in capsys.readouterr().err


def test_without_a_model_it_is_smollm2(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(model: str, adapters: dict[str, Path], **settings: object) -> Engine:
        raise ConfigError("seen", model, str(sorted(adapters)))

    monkeypatch.setattr(Engine, "load", load)
    adapters = ["--adapter", "writer=w", "--adapter", "critic=c"]
    data = str(folder / "tasks.jsonl")
    assert main(["agents", "writer_critic", "--data", data, *adapters]) == 2
    assert "seen: got 'smollm2', allowed is ['critic', 'writer']" in capsys.readouterr().err


def test_a_role_without_an_adapter_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(folder / "tasks.jsonl")
    assert main(["agents", "writer_critic", "--data", data, "--model", "m"]) == 2
    assert "one for each of the roles ['writer', 'critic'] too" in capsys.readouterr().err


def test_without_options_it_is_smollm2_with_the_demos_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, set[str], str]] = []

    def load(name: str, adapters: dict[str, Path], policy: str) -> None:
        assert all((path / "adapter_model.safetensors").is_file() for path in adapters.values())
        asked.append((name, set(adapters), policy))
        raise ConfigError("model", name, "nothing, this is a test")

    monkeypatch.setattr(Engine, "load", load)
    transcript = "\nThought 1: I know.\nAction 1: Finish[Paris]\nObservation 1: Please reflect."
    row = {"question": "Who wrote it?", "prompt": transcript}  # a question that is held out
    (tmp_path / "hotpotqa_episodes.jsonl").write_text(json.dumps(row) + "\n")
    assert main(["agents", "hotpotqa", "--mode", "forced", "--data", str(tmp_path)]) == 2
    assert asked == [("smollm2", {"plan", "action", "reflect"}, "rebaseshared")]
