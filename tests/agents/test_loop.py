"""The loop over a scripted client: the text, the order of turns, what is malformed, where it ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, cycle

import pytest

from precache.agents import Corpus, Episode, PlayOptions, Toolbox, WorkflowError, load_workflow
from precache.agents.workflow import Bounds, Workflow
from precache.tasks import HOTPOTQA, SCIENCEQA
from tests.agents.fakes import PAGES, QUESTION, RIGHT, ScriptedClient

HOTPOT = load_workflow("hotpotqa")


def bounded(**bounds: object) -> Workflow:
    return replace(HOTPOT, bounds=replace(HOTPOT.bounds, **bounds))  # type: ignore[arg-type]


def play(
    texts: Iterable[str], workflow: Workflow = HOTPOT, *, usage: bool = True
) -> tuple[Episode, ScriptedClient]:
    client = ScriptedClient(texts, usage=usage)
    tools = Toolbox(QUESTION, Corpus(PAGES)).tools()
    fields = {"question": QUESTION.text, "options": ""}
    episode = Episode(workflow, client, "q1", fields, tools, PlayOptions(tool_timeout_s=5))
    for _ in episode.play():
        pass
    return episode, client


def test_text_is_that_of_the_training_episodes() -> None:
    episode, client = play([" Read it.", " Retrieve", "Paris", *RIGHT])
    assert episode.text == HOTPOTQA.header(QUESTION.text) + (
        "Thought 1: Read it.\nAction 1: Retrieve[Paris]\n"
        "Observation 1: Paris is the capital of France. Paris lies on the Seine.\n"
        "Thought 2: I know.\nAction 2: Finish[Paris]\n"
        "Observation 2: Please reflect your answer.\n"
        "Thought 3: It is.\nAction 3: Reflect[right]\n"
    )
    assert episode.record.trajectory.text == episode.text
    assert [r.agent for r in client.requests] == 2 * ["plan", "plan", "action"] + 2 * ["reflect"]
    assert episode.record.outcome == "accepted"
    assert episode.record.answer == "Paris"
    assert not episode.record.malformed


@pytest.mark.parametrize("task", [HOTPOTQA, SCIENCEQA], ids=lambda task: task.name)
def test_workflows_open_as_the_tasks_do(task: object) -> None:
    assert isinstance(task, type(HOTPOTQA))
    workflow = load_workflow(task.name)
    options = "(A) x" if task is SCIENCEQA else None
    fields = {"question": "Why {so}?", "options": options}
    assert workflow.header.format_map(fields) == task.header("Why {so}?", options)
    assert workflow.tools == task.tools


def test_every_prompt_begins_with_the_one_before_it() -> None:
    _, client = play([" Read it.", " Retrieve", "Paris", *RIGHT])
    prompts = [request.prompt for request in client.requests]
    assert len(prompts) == 8
    assert all(new.startswith(old) for old, new in zip(prompts, prompts[1:], strict=False))


def test_a_rejected_answer_starts_the_next_cycle() -> None:
    wrong = [" Rome?", " Finish", "Rome", " No.", " Reflect[wrong]"]
    episode, _ = play([*wrong, *RIGHT])
    assert "Observation 2: The answer maybe wrong, please try to solve" in episode.text
    assert (episode.record.answer, episode.record.cycles) == ("Paris", 1)
    assert episode.record.outcome == "accepted"


def test_cycles_are_bounded() -> None:
    wrong = [" Rome?", " Finish", "Rome", " No.", " Reflect[wrong]"]
    episode, _ = play(cycle(wrong), bounded(max_cycles=2))
    assert (episode.record.outcome, episode.record.cycles) == ("max_cycles", 2)
    assert episode.record.answer == "Rome"


@pytest.mark.parametrize(
    ("texts", "kind"),
    [
        ([" ", " Finish", "Paris", " It is.", " Reflect[right]"], "empty_text"),
        ([" Hm.", "", *RIGHT], "no_action"),
        ([" Hm.", " Dance", *RIGHT], "unknown_action"),
        ([" Hm.", " Reflect", "right", *RIGHT], "misplaced_action"),
        ([" Hm.", " Search", " ", *RIGHT], "empty_argument"),
        ([*RIGHT[:4], " Nothing", " So.", " Reflect[right]"], "unknown_action"),
        ([*RIGHT[:4], " Reflect[maybe]", " So.", " Reflect[right]"], "unknown_action"),
        ([" Thinking on and on...", *RIGHT[1:]], "unended"),
        ([" I see" + " the cat" * 9 + "...", *RIGHT[1:]], "repetition"),
    ],
)
def test_malformed_output_is_counted_and_the_episode_goes_on(texts: list[str], kind: str) -> None:
    episode, _ = play(texts)
    assert episode.record.malformed == {kind: 1}
    assert (episode.record.outcome, episode.record.answer) == ("accepted", "Paris")


def test_an_unknown_action_gets_an_observation_with_the_valid_ones() -> None:
    episode, _ = play([" Hm.", " Dance", *RIGHT])
    assert (
        "Action 1: Dance\nObservation 1: Invalid Action. Valid Actions are Search[" in episode.text
    )


def test_repeated_words_are_written_once() -> None:
    episode, _ = play([" I see" + " the cat" * 9 + " th...", *RIGHT[1:]])
    assert "Thought 1: I see the cat\n" in episode.text


def test_malformed_outputs_in_a_row_end_the_episode() -> None:
    episode, _ = play(cycle([" Hm.", " Dance"]))
    assert episode.record.outcome == "malformed"
    assert episode.record.malformed == {"unknown_action": 3}


def test_the_same_action_over_and_over_ends_the_episode() -> None:
    episode, _ = play(cycle([" Hm.", " Search", "Paris"]))
    assert (episode.record.outcome, episode.record.steps) == ("repeating", 3)


@pytest.mark.parametrize(
    ("bounds", "outcome"),
    [
        ({"max_steps": 2}, "max_steps"),
        ({"max_output_tokens": 10}, "max_output_tokens"),
        ({"max_context_tokens": 300}, "max_context_tokens"),
    ],
)
@pytest.mark.parametrize("usage", [True, False], ids=["usage", "no-usage"])
def test_every_bound_ends_the_episode(bounds: dict[str, int], outcome: str, usage: bool) -> None:
    queries = (f"word {number}" for number in range(100))
    texts = chain.from_iterable([" Hm.", " Search", query] for query in queries)
    episode, _ = play(texts, bounded(**bounds), usage=usage)
    assert episode.record.outcome == outcome


def test_a_tool_can_be_forced_from_a_step_on() -> None:
    episode, client = play(
        [" Hm.", "Paris", " It is.", " Reflect[right]"], bounded(force_tool="Finish")
    )
    assert "Action 1: Finish[Paris]" in episode.text
    assert [turn.name for turn in episode.record.turns] == ["think", "fill", "consider", "judge"]


def test_a_refused_turn_ends_the_episode_and_says_why() -> None:
    episode, _ = play([" Hm."])
    assert (episode.record.outcome, episode.record.error) == ("refused", "the script is over")


def test_a_writer_and_a_critic_need_no_code() -> None:
    client = ScriptedClient(
        [" A cat.", " Too short.", " revise", " A black cat.", " Good.", " Accept."]
    )
    workflow = load_workflow("writer_critic")
    episode = Episode(workflow, client, "w1", {"question": "Describe a cat."}, {})
    assert len(list(episode.play())) == 6
    assert (episode.record.outcome, episode.record.answer) == ("accepted", "A black cat.")
    assert "Verdict 1: revise\nDraft 2: A black cat.\nRemark 2: Good." in episode.text


def test_a_workflow_without_its_tools_is_refused() -> None:
    with pytest.raises(WorkflowError, match=r"no tool for the actions \['Search'"):
        Episode(HOTPOT, ScriptedClient([]), "q1", {"question": "Q", "options": ""}, {})


def test_bounds_of_the_shipped_workflows_are_autoacts() -> None:
    assert HOTPOT.bounds == Bounds()
