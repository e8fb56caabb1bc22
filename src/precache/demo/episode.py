"""The demo's question as an episode of the ScienceQA workflow: few steps, and one answer."""

from __future__ import annotations

from dataclasses import replace

from precache.agents import CompletionClient, Episode, Tool, load_workflow
from precache.demo.question import DemoQuestion

MAX_SEARCHES = 3


def demo_episode(client: CompletionClient, question: DemoQuestion) -> Episode:
    """After MAX_SEARCHES steps the next action is Finish, unasked; once the answer is judged, the demo ends."""
    workflow = load_workflow("scienceqa")
    bounds = replace(
        workflow.bounds,
        max_steps=MAX_SEARCHES + 2,
        max_cycles=1,
        max_malformed=MAX_SEARCHES + 2,
        force_tool="Finish",
        force_from=MAX_SEARCHES + 1,
    )
    fields = {"question": question.question, "options": question.options}
    tools = {name: _saying(text) for name, text in question.tools.items()}
    return Episode(replace(workflow, bounds=bounds), client, "demo", fields, tools)


def _saying(text: str) -> Tool:
    return lambda _: text
