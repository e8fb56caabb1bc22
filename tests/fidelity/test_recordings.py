"""Text to turns of token ids, and the files that are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from precache.fidelity import FidelityError
from precache.fidelity.recordings import (
    RecordedTurn,
    Recording,
    check_recordings,
    read_any,
    record,
)
from precache.tasks import Segment, Trajectory, write_trajectories
from tests.engine.setup import Setup

TEXT = Trajectory(
    "q1",
    (
        Segment(None, "Q: why?\nT:"),
        Segment("plan", " So."),
        Segment("plan", " Yes["),
        Segment("action", "it]"),
        Segment(None, "\nObs: fine\nT:"),
        Segment("reflect", " Good."),
        Segment(None, "\nover"),
    ),
)
EPISODE = "\nThought 1: I know.\nAction 1: Finish[A]\nObservation 1: Answer is CORRECT\n"


def said(recording: Recording, setup: Setup) -> list[tuple[str, str]]:
    return [
        (turn.role, setup.tokenizer.decode(recording.token_ids[turn.start : turn.end]))
        for turn in recording.turns
    ]


def test_turns_are_what_the_roles_said(setup: Setup) -> None:
    recording = record(TEXT, setup.tokenizer.encode_prompt)
    assert said(recording, setup) == [
        ("plan", " So."),
        ("plan", " Yes["),
        ("action", "it]"),
        ("reflect", " Good."),
    ]
    assert list(recording.token_ids) == setup.tokenizer.encode_prompt(TEXT.text)
    assert recording.roles == ("plan", "action", "reflect")
    assert recording.tokens_said() == {"plan": 9, "action": 3, "reflect": 6}


def test_a_token_over_a_border_belongs_to_the_later_segment() -> None:
    words = {"Q:": [1, 2], "Q: a": [1, 3], "Q: a b": [1, 3, 4], "Q: a bc": [1, 3, 5]}
    text = Trajectory(
        "q", (Segment(None, "Q:"), Segment("plan", " a"), Segment("act", " b"), Segment(None, "c"))
    )
    recording = record(text, lambda prompt: words[prompt])
    # 3 is " a" and the end of the prompt; 5 is "bc", of which act said only a part
    assert recording.turns == (RecordedTurn("plan", 1, 2),)


@pytest.mark.parametrize(
    "turns", [[("a", 0, 2)], [("a", 2, 2)], [("a", 2, 9)], [("a", 4, 6), ("b", 5, 7)], []]
)
def test_turns_that_cannot_be_replayed_are_refused(turns: list[tuple[str, int, int]]) -> None:
    with pytest.raises(FidelityError, match="trajectory 'q'"):
        Recording("q", tuple(range(8)), tuple(RecordedTurn(*turn) for turn in turns))


def test_roles_without_an_adapter_and_long_texts_are_refused() -> None:
    recording = Recording("q", tuple(range(8)), (RecordedTurn("critic", 2, 8),))
    check_recordings([recording], ["base", "critic"], 8)
    with pytest.raises(FidelityError, match=r"roles \['critic'\].*\['base', 'plan'\]"):
        check_recordings([recording], ["base", "plan"], 8)
    with pytest.raises(FidelityError, match="8 tokens, the context window is 7"):
        check_recordings([recording], ["critic"], 7)
    with pytest.raises(FidelityError, match="no trajectory"):
        check_recordings([], ["critic"], 7)


def test_our_own_format(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    write_trajectories(path, [TEXT])
    assert read_any(path, "scienceqa") == [TEXT]


def test_recorded_episodes_as_file_and_as_folder(tmp_path: Path) -> None:
    path = tmp_path / "hotpotqa_episodes.jsonl"
    row = {"question": "Why?", "prompt": EPISODE, "answer": "A"}
    path.write_text(json.dumps(row) + "\n")
    (found,) = read_any(path, "scienceqa")  # the file's name says which task
    assert found.question_id == "Why?"
    assert found.roles == ("plan", "action")
    assert read_any(tmp_path, "hotpotqa") == [found]


def test_a_results_file_of_the_agents(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    segments = [{"role": s.role, "text": s.text} for s in TEXT.segments]
    key = {"policy": "prelrshared", "mode": "natural", "level": "x", "question_id": "q1"}
    row: dict[str, Any] = {**key, "repeat": 0, "seconds": 1.0, "episode": {"segments": segments}}
    path.write_text(json.dumps({"settings": {}}) + "\n" + json.dumps(row) + "\n")
    assert read_any(path, "scienceqa") == [TEXT]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"input": "a", "output": "b"}\n', r"keys \['input', 'output'\]"),
        ("[1]\n", "expected a JSON object"),
        ("hello\n", "expected a JSON object"),
        ("", "expected a JSON object"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(FidelityError, match=message):
        read_any(path, "scienceqa")
    with pytest.raises(FidelityError, match="cannot be read"):
        read_any(tmp_path / "none.jsonl", "scienceqa")
