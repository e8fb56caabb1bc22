"""ScienceQA: multiple-choice science questions, with tools for images and for search."""

from __future__ import annotations

from precache.tasks.task import Task

SCIENCEQA = Task(
    name="scienceqa",
    instructions=(
        "Answer the multiple-choice science question in steps of Thought, Action and Observation. "
        "Actions: Image2Text[image] describes the image, Search[query] searches the web, "
        "Retrieve[entity] reads an encyclopedia page, Finish[letter] gives the answer, "
        "Reflect[right] or Reflect[wrong] judges it and must follow Finish."
    ),
    tools=("Image2Text", "Search", "Retrieve", "Finish", "Reflect"),
)
