"""The source's oddities, one by one, on transcripts written for these tests."""

from __future__ import annotations

import pytest

from precache.tasks import EpisodeParseError, parse_episode
from precache.tasks.episodes import clip

TOOLS = ("Search", "Retrieve", "Image2Text", "Finish", "Reflect")

CLEAN = """Some other instructions, with an example: Search[x]
Question: Which is hottest?
Options:(A) Ice (B) Steam

Thought 1: I look it up.
Action 1: BingSearch[heat of steam]
Observation 1: Steam is hot.
Thought 2: It is steam.
Action 2: Finish[B]
Observation 2: Please reflect your answer.
Thought 3: Correct.
Action 3: Reflect[right]
Observation 3: Answer is CORRECT"""

QUESTION = "Which is hottest?\nOptions:(A) Ice (B) Steam"


def test_clean_episode_is_read_whole() -> None:
    episode = parse_episode(QUESTION, CLEAN, TOOLS)

    assert (episode.question, episode.options) == ("Which is hottest?", "(A) Ice (B) Steam")
    assert [(s.tool, s.argument) for s in episode.steps] == [
        ("Search", "heat of steam"),
        ("Finish", "B"),
        ("Reflect", "right"),
    ]
    assert [s.thought for s in episode.steps] == ["I look it up.", "It is steam.", "Correct."]


def test_verdict_is_dropped_because_no_agent_sees_it() -> None:
    episode = parse_episode(QUESTION, CLEAN, TOOLS)

    assert episode.steps[0].observation == "Steam is hot."
    assert episode.steps[-1].observation is None


@pytest.mark.parametrize(
    "written",
    [
        "BingSearch[heat of steam].",
        "Bingsearch[heat of steam] to get more information.",
        "BingSearch [heat of steam]",
        "BingSearch[heat   of steam]. Searching [again]...",
    ],
)
def test_call_is_read_in_every_spelling(written: str) -> None:
    transcript = CLEAN.replace("BingSearch[heat of steam]", written)

    step = parse_episode(QUESTION, transcript, TOOLS).steps[0]

    assert (step.tool, step.argument) == ("Search", "heat of steam")


def test_brackets_inside_an_argument_are_kept() -> None:
    transcript = CLEAN.replace("[heat of steam]", "[steam [gas] heat].")

    assert parse_episode(QUESTION, transcript, TOOLS).steps[0].argument == "steam [gas] heat"


def test_misplaced_reflection_is_dropped() -> None:
    transcript = """
Thought 1: I guess.
Action 1: Reflect[right].
Observation 1: Invalid action. Reflect only follows the Finish action.
Thought 2: It is steam.
Action 2: Finish[B]
Observation 2: Please reflect your answer.
Thought 3: Correct.
Action 3: Reflect[right]
Observation 3: Answer is CORRECT"""

    steps = parse_episode(QUESTION, transcript, TOOLS).steps

    assert [step.thought for step in steps] == ["It is steam.", "Correct."]
    assert steps[1].is_reflection


@pytest.mark.parametrize("call", ["Retrieve[steam]", "Reflect[right/wrong]"])
def test_run_that_goes_on_without_a_verdict_is_cut_after_its_answer(call: str) -> None:
    transcript = CLEAN.replace("Reflect[right]", call)

    assert [s.tool for s in parse_episode(QUESTION, transcript, TOOLS).steps] == [
        "Search",
        "Finish",
    ]


def test_reading_stops_at_a_broken_step() -> None:
    tail = "\nThought 4: \nAction 4: None\nObservation 4: None"

    assert len(parse_episode(QUESTION, CLEAN + tail, TOOLS).steps) == 3


def test_old_tool_name_is_also_replaced_in_prose() -> None:
    transcript = CLEAN.replace("It is steam.", "BingSearch says steam.")

    assert parse_episode(QUESTION, transcript, TOOLS).steps[1].thought == "Search says steam."


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("Thought 1: I look it up.", "Thought 1: ", "no readable step"),
        ("BingSearch[", "Refresh[", "no readable step"),
        ("Action 2: Finish[B]", "Action 2: None", "no Finish"),
    ],
)
def test_unusable_episode_says_why(old: str, new: str, reason: str) -> None:
    assert old in CLEAN
    with pytest.raises(EpisodeParseError, match=reason):
        parse_episode(QUESTION, CLEAN.replace(old, new), TOOLS)


def test_clip_unescapes_and_cuts_at_a_word() -> None:
    assert clip("it&#39;s\n  one line") == "it's one line"
    assert clip("alpha beta gamma", limit=13) == "alpha..."
    assert len(clip("word " * 500)) <= 400
