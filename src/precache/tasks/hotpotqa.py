"""HotpotQA: questions that need facts from several pages; the answer is free text."""

from __future__ import annotations

from precache.tasks.task import Task

HOTPOTQA = Task(
    name="hotpotqa",
    instructions=(
        "Answer the question in steps of Thought, Action and Observation. "
        "Actions: Search[query] searches the web, Retrieve[entity] reads an encyclopedia page, "
        "Lookup[keyword] finds the next sentence with the keyword in the last page, "
        "Finish[answer] gives the answer (yes or no where it is asked), "
        "Reflect[right] or Reflect[wrong] judges it and must follow Finish."
    ),
    tools=("Search", "Retrieve", "Lookup", "Finish", "Reflect"),
)
