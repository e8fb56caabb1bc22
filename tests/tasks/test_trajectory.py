"""One text for all roles: spans, turns and the file format."""

from __future__ import annotations

from pathlib import Path

import pytest

from precache.tasks import (
    HOTPOTQA,
    ROLES,
    SCIENCEQA,
    Episode,
    Segment,
    Step,
    Trajectory,
    TrajectoryFormatError,
    action_cue,
    observation_line,
    read_trajectories,
    thought_cue,
    write_trajectories,
)

EPISODE = Episode(
    question="Which is hottest?",
    options="(A) Ice (B) Steam",
    steps=(
        Step("I look it up.", "Search", "heat of steam", "Steam is hot."),
        Step("It is steam.", "Finish", "B", "Please reflect your answer."),
        Step("That fits.", "Reflect", "right", None),
    ),
)


@pytest.fixture
def trajectory() -> Trajectory:
    return SCIENCEQA.trajectory(EPISODE)


def test_text_is_the_documented_format(trajectory: Trajectory) -> None:
    assert trajectory.text == (
        SCIENCEQA.instructions + "\nQuestion: Which is hottest?\nOptions: (A) Ice (B) Steam\n"
        "Thought 1: I look it up.\nAction 1: Search[heat of steam]\nObservation 1: Steam is hot.\n"
        "Thought 2: It is steam.\nAction 2: Finish[B]\n"
        "Observation 2: Please reflect your answer.\n"
        "Thought 3: That fits.\nAction 3: Reflect[right]\n"
    )


@pytest.mark.parametrize(
    ("role", "written"),
    [
        ("plan", [" I look it up.\n", " Search[", " It is steam.\n", " Finish["]),
        ("action", ["heat of steam]\n", "B]\n"]),
        ("reflect", [" That fits.\n", " Reflect[right]\n"]),
    ],
)
def test_spans_cover_exactly_what_a_role_writes(
    trajectory: Trajectory, role: str, written: list[str]
) -> None:
    text = trajectory.text

    assert [text[start:end] for start, end in trajectory.spans(role)] == written
    assert [turn.target for turn in trajectory.turns(role)] == written


def test_every_prompt_is_a_prefix_of_the_one_text_ending_in_its_cue(
    trajectory: Trajectory,
) -> None:
    turns = trajectory.turns()

    assert {turn.role for turn in turns} == set(ROLES)
    assert all(trajectory.text.startswith(turn.prompt + turn.target) for turn in turns)
    assert [turn.prompt.rsplit("\n", 1)[1] for turn in turns] == [
        "Thought 1:",
        "Action 1:",
        "Action 1: Search[",
        "Thought 2:",
        "Action 2:",
        "Action 2: Finish[",
        "Thought 3:",
        "Action 3:",
    ]


def test_agent_loop_built_from_the_cues_writes_the_same_text(trajectory: Trajectory) -> None:
    plan, action = (iter(trajectory.turns(role)) for role in ("plan", "action"))
    text = SCIENCEQA.header(EPISODE.question, EPISODE.options)
    for number in (1, 2):
        text += thought_cue(number) + next(plan).target
        text += action_cue(number) + next(plan).target + next(action).target
        text += observation_line(number, EPISODE.steps[number - 1].observation or "")

    assert trajectory.text.startswith(text)
    assert text.endswith("Please reflect your answer.\n")


def test_observation_is_clipped_to_one_line() -> None:
    line = observation_line(3, "two\nlines " + "word " * 500)

    assert line.startswith("Observation 3: two lines word")
    assert line.count("\n") == 1
    assert len(line) < 430


def test_free_answer_task_has_no_options_line() -> None:
    assert "Options" not in HOTPOTQA.header("Who was it?")


def test_file_round_trip(trajectory: Trajectory, tmp_path: Path) -> None:
    other = Trajectory("q2", (Segment(None, "Frage: \u2028 ü?"), Segment("critic", " nein\n")))
    path = tmp_path / "runs.jsonl"

    write_trajectories(path, [trajectory, other])

    assert read_trajectories(path) == [trajectory, other]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2"),
        ('{"question_id": "q"}', r"\['question_id'\]; expected .*segments"),
        ('{"question_id": 3, "segments": []}', "question_id is 3; expected str"),
        ('{"question_id": "q", "segments": []}', "has no segments"),
        ('{"question_id": "q", "segments": [{"role": 1, "text": "a"}]}', "str or null"),
        ('{"question_id": "q", "segments": [{"role": null, "text": ""}]}', "text is empty"),
        ('{"question_id": "q", "segments": [{"role": "plan", "text": "a"}]}', "begins with role"),
    ],
)
def test_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "runs.jsonl"
    good = '{"question_id": "q", "segments": [{"role": null, "text": "a"}]}'
    path.write_text(f"{good}\n{line}\n")

    with pytest.raises(TrajectoryFormatError, match=message) as caught:
        read_trajectories(path)
    assert "runs.jsonl, line 2" in str(caught.value)
