"""Carries out the actions that agents call: asks the tool, takes the answer, or says why it cannot be done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from precache.agents.reading import Call, Malformed
from precache.agents.record import ToolCall
from precache.agents.tools import Tool, ToolResult, run_tool
from precache.agents.workflow import (
    INVALID,
    OTHERWISE,
    ActionSpec,
    TurnSpec,
    Workflow,
    WorkflowError,
)
from precache.tasks.episodes import clip


class Effect(NamedTuple):
    """What an action led to.

    `choice` is the key of the turn's `next`; the roles read `observation`, if there is any. `done` is None where the
    action was refused, and `malformed` says why.
    """

    choice: str
    observation: str
    done: ToolCall | None = None
    malformed: Malformed | None = None
    answer: str | None = None
    new_cycle: bool = False


class Actions:
    """The actions of one episode. Owns what was called, for `follows` and against repetition.

    Raises WorkflowError if an action has no tool.
    """

    def __init__(self, workflow: Workflow, tools: Mapping[str, Tool], timeout_s: float) -> None:
        missing = [a.name for a in workflow.actions.values() if a.tool and a.name not in tools]
        if missing:
            raise WorkflowError(f"workflow {workflow.name}: no tool for the actions {missing}")
        self._workflow = workflow
        self._tools = tools
        self._timeout_s = timeout_s
        self._calls: list[Call] = []

    def carry_out(self, spec: TurnSpec, call: Call, step: int) -> Effect:
        """Do what a turn called. Never raises for what an agent or a tool did."""
        action = self._workflow.action(call.tool, call.argument)
        last_tool = self._calls[-1].tool if self._calls else None
        if action is None:
            return Effect(INVALID, self.valid_actions(), malformed="unknown_action")
        if action.follows not in (None, last_tool):
            text = f"Invalid action. {call.tool} only follows the {action.follows} action."
            return Effect(INVALID, text, malformed="misplaced_action")
        self._calls.append(call)
        result = self._result(action, call)
        observation = clip(result.observation)
        return Effect(
            choice=next(key for key in (action.name, call.tool, OTHERWISE) if key in spec.next),
            observation=observation,
            done=ToolCall(step, *call, observation, result.status, result.seconds),
            answer=call.argument if action.answer else None,
            new_cycle=action.new_cycle,
        )

    def valid_actions(self) -> str:
        """The observation after an action that nobody knows."""
        names = " ".join(f"{tool}[...]" for tool in self._workflow.tools)
        return f"Invalid Action. Valid Actions are {names}"

    def is_repeating(self) -> bool:
        """Whether the last `max_repeats` calls were one and the same."""
        most = self._workflow.bounds.max_repeats
        last = self._calls[-most:]
        return len(last) == most > 1 and len(set(last)) == 1

    def _result(self, action: ActionSpec, call: Call) -> ToolResult:
        if not action.tool:
            return ToolResult(action.says or "", "builtin", 0.0)
        return run_tool(call.tool, self._tools[call.tool], call.argument, self._timeout_s)
