"""Workflows are read from YAML and refused with the key that is wrong."""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from precache.agents import WorkflowError, load_workflow, parse_workflow

GOOD: dict[str, Any] = {
    "name": "talk",
    "header": "Q: {question}\n",
    "start": "say",
    "turns": {
        "say": {"role": "a", "cue": "A {step}:", "max_tokens": 8, "next": "act"},
        "act": {
            "role": "b",
            "writes": "call",
            "max_tokens": 8,
            "next": {"otherwise": "end", "invalid": "say"},
        },
    },
    "actions": {"Finish": {"answer": True}},
    "observation": "O {step}: {text}\n",
}


def test_a_workflow_of_a_users_own_is_read(tmp_path: Path) -> None:
    path = tmp_path / "talk.yaml"
    path.write_text(yaml.safe_dump(GOOD, sort_keys=False))
    workflow = load_workflow(path)
    assert (workflow.roles, workflow.tools) == (("a", "b"), ("Finish",))
    assert workflow.turns["say"].next == {"otherwise": "act"}
    assert workflow.turns["say"].stop == ("\n",)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("start",), "nobody", "start: 'nobody' is none of"),
        (("header",), "{clock}", "header: got \\['clock'\\]"),
        (("turns", "say", "colour"), "red", "turns.say: unknown keys \\['colour'\\]"),
        (("turns", "say", "next"), "nobody", "turns.say.next: \\['nobody'\\] are no turns"),
        (("turns", "say", "max_tokens"), 0, "turns.say.max_tokens: got 0"),
        (("turns", "say", "stop"), [""], "turns.say.stop: got ''"),
        (("turns", "say", "cue"), "{time}:", "turns.say.cue: got"),
        (("turns", "act", "writes"), "poem", "turns.act.writes: got 'poem'"),
        (("turns", "act", "next"), "end", "turns.act.next: needs \\['invalid'\\]"),
        (("observation",), "", "needs actions and observation"),
        (("actions", "Two words"), {}, "actions: 'Two words' is neither"),
        (("bounds",), {"max_steps": 0}, "bounds.max_steps: got 0"),
        (("bounds",), {"force_tool": "Sing"}, "bounds.force_tool: 'Sing'"),
        (("turns",), [], "turns: got list"),
    ],
)
def test_what_cannot_be_played_is_refused(
    path: tuple[str, ...], value: object, message: str
) -> None:
    data = deepcopy(GOOD)
    target = data
    for name in path[:-1]:
        target = target[name]
    target[path[-1]] = value
    with pytest.raises(WorkflowError, match=message):
        parse_workflow(data)


def test_a_missing_key_and_a_missing_file_are_named(tmp_path: Path) -> None:
    data = deepcopy(GOOD)
    del data["header"]
    with pytest.raises(WorkflowError, match=r"needs \['header'\]"):
        parse_workflow(data)
    with pytest.raises(WorkflowError, match="got 'nothing', expected a .yaml file or one of .*hot"):
        load_workflow("nothing")
    with pytest.raises(WorkflowError, match="workflow nothing.yaml: .* cannot be read"):
        load_workflow("nothing.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(WorkflowError, match="is not YAML"):
        load_workflow(tmp_path / "bad.yaml")


def test_the_example_of_the_docs_is_the_one_that_ships() -> None:
    docs = (Path(__file__).parents[2] / "docs" / "agents.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n(.*?)```", docs, re.DOTALL)
    assert parse_workflow(yaml.safe_load(example)) == load_workflow("writer_critic")
