"""`precache compare` from end to end on a tiny model, and its mistakes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from precache.cli.main import main
from precache.tasks import Segment, Trajectory, split_of, write_trajectories
from tests.engine.setup import AGENTS, Setup


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "runs.jsonl"
    write_trajectories(path, [trajectory(number) for number in range(5)])
    return path


def trajectory(number: int) -> Trajectory:
    return Trajectory(
        f"q{number}",
        (
            Segment(None, f"Question {number}: why? Thought:"),
            Segment("plan", f" I look for {number}.\n"),
            Segment(None, "Action:"),
            Segment("action", f" Find[{number}]\n"),
            Segment(None, "Seen: nothing. Thought:"),
            Segment("reflect", " That is wrong.\n"),
        ),
    )


def compare(setup: Setup, runs: Path, *options: str) -> int:
    roles = [x for r in AGENTS for x in ("--adapter", f"{r}={setup.adapters()[r]}")]
    return main(
        [
            "compare",
            setup.model,
            *roles,
            "--trajectories",
            str(runs),
            "--dtype",
            "float32",
            *options,
        ]
    )


def test_all_policies_that_the_adapters_allow(
    setup: Setup, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(setup, runs, "--json") == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out.splitlines()[-1])
    rows = {(row["policy"], row["role"]): row for row in found["rows"]}
    policies = ["nonshared", "fullshared", "baseshared", "prelrshared", "rebaseshared"]
    assert list(rows) == [(p, role) for p in policies for role in ("all", *AGENTS)]
    row = rows["prelrshared", "action"]
    assert row["kl_low"] <= row["kl"] <= row["kl_high"]
    assert row["kl"] > 0
    assert row["tokens"] == 5 * len(" Find[0]\n")
    assert rows["nonshared", "all"]["kl"] == 0
    assert [cost["policy"] for cost in found["costs"]] == policies
    assert [item["role"] for item in found["recommendations"]] == ["all", *AGENTS]
    assert "baselrshared" in found["refused"]
    assert all(item["sentence"] in captured.out for item in found["recommendations"])


def test_the_first_trajectories_under_chosen_policies(
    setup: Setup, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--limit", "2", "--policies", "fullshared", "--json"]
    assert compare(setup, runs, *options) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [cost["policy"] for cost in found["costs"]] == ["nonshared", "fullshared"]
    assert found["settings"]["num_trajectories"] == 2
    assert found["refused"] == {}


def test_a_report_with_layers_needs_nothing_else(
    setup: Setup, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    report = tmp_path / "report.html"
    policies = ["--policies", "prelrshared,rebaseshared"]
    assert compare(setup, runs, *policies, "--layers", "--html", str(report), "--json") == 0
    captured = capsys.readouterr().out
    found = json.loads(captured.splitlines()[-1])
    assert {row["layer"] for row in found["layers"]["rows"]} == {0, 1, 2, 3}
    assert len(found["layers"]["pairs"]) == 6
    assert set(found["layers"]["pairs"][0]["k_ratio"]) == {"value", "low", "high"}
    assert [item["reader"] for item in found["layers"]["predictions"]] == list(AGENTS)

    page = ElementTree.fromstring(_as_xml(report.read_text()))
    tags = [element.tag.rpartition("}")[2] for element in page.iter()]
    assert tags.count("svg") == 4 + 1 + 2 * 6  # KL by role, cost, and two a pair
    assert not {"script", "link", "img", "iframe"} & set(tags)
    links = [
        value
        for element in page.iter()
        for name, value in element.attrib.items()
        if name.endswith(("href", "src"))
    ]
    assert all(value.startswith("#") for value in links)
    text = "".join(page.itertext())
    assert all(
        " ".join(item["sentence"].split()) in " ".join(text.split())
        for item in found["recommendations"]
    )
    row = next(r for r in found["rows"] if (r["policy"], r["role"]) == ("rebaseshared", "action"))
    assert f"{row['kl']:.4f} [{row['kl_low']:.4f}, {row['kl_high']:.4f}]" in text


def test_a_calibration_is_written(
    setup: Setup, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "corrections.safetensors"
    options = ["--calibrate", "--out", str(path), "--rank", "3", "--json"]
    assert compare(setup, runs, *options) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert path.is_file()
    assert (found["rank"], found["ridge"]) == (3, 0.01)
    assert set(found["explained"]) == set(AGENTS)
    assert all(0 < share < 1 for share in found["explained"].values())


def test_a_profile_is_written_and_read(
    setup: Setup, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "layers.json"
    names = ["droidspeak", "droidspeak-scattered"]
    options = ["--recompute-share", "0.5", "--limit", "1"]
    profile = ["--profile", ",".join(names), "--out", str(path)]
    assert compare(setup, runs, *options, *profile, "--json") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {name: len(layers) for name, layers in found["layers"].items()} == dict.fromkeys(
        names, 2
    )
    written = json.loads(path.read_text())["policies"]
    assert {name: written[name]["layers"] for name in names} == found["layers"]

    chosen = ["--policies", "droidspeak", "--recompute-profile", str(path), "--json"]
    assert compare(setup, runs, *options, *chosen) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    measured = min(kl for _, kl in json.loads(path.read_text())["made_by"]["kl"]["droidspeak"])
    (row,) = [row for row in rows if (row["policy"], row["role"]) == ("droidspeak", "all")]
    assert row["kl"] == pytest.approx(measured, rel=1e-6)


def _as_xml(page: str) -> str:
    """The page with its empty elements closed, so that an XML parser can read it."""
    return re.sub(r"<(meta [^>]*)>", r"<\1/>", page.replace("<!doctype html>", ""))


def test_a_split_by_question(
    setup: Setup, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = {split_of(f"q{n}"): n for n in range(20)}
    runs = tmp_path / "runs.jsonl"
    write_trajectories(runs, [trajectory(sides["train"]), trajectory(sides["heldout"])])
    options = ["--split", "heldout", "--policies", "fullshared", "--json"]
    assert compare(setup, runs, *options) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["settings"]["num_trajectories"] == 1
    assert found["rows"][0]["kl_low"] is None  # one trajectory has no interval
    write_trajectories(runs, [trajectory(sides["train"])])
    assert compare(setup, runs, *options) == 2
    assert "--split: got 'heldout'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policies", "sharing"], "--policies: got 'sharing'"),
        (["--policies", "baselrshared"], "policy 'baselrshared' is not allowed"),
        (["--limit", "0"], "--limit: got 0"),
        (["--rank", "4"], "--rank: got '4', allowed is given with --calibrate"),
        (["--first-layer", "2"], "--first-layer: got '2', allowed is given with --calibrate"),
        (["--stride", "2"], "--stride: got '2', allowed is given with --profile"),
        (["--rank", "0"], "--rank: got '0', allowed is given with --calibrate"),
        (["--out", "x"], "--out: got 'x', allowed is given with --profile or --calibrate"),
        (["--calibrate", "--out", "x", "--layers"], "--layers: got 'True', allowed is given when"),
        (["--calibrate"], "--out: got None"),
        (["--calibrate", "--profile", "droidspeak"], "either --profile or --calibrate"),
        (["--profile", "nonshared", "--out", "x"], "--profile: got 'nonshared'"),
        (["--html", "/no/such/folder/report.html"], "--html: got"),
        (["--adapter", "plan=x"], "--adapter: got 'plan'"),
    ],
)
def test_mistakes_are_told(
    setup: Setup,
    runs: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    assert compare(setup, runs, *options) == 2
    assert message in capsys.readouterr().err
