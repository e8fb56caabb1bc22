"""A workflow as data: the roles, what each is shown, when it stops, and whose turn comes next.

Owns the dataclasses and how they are read from YAML and checked. `loop.py` plays them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from string import Formatter
from typing import Any, Literal, TypeVar, cast, get_args

import yaml

from precache.errors import PrecacheError
from precache.request import SamplingParams

END = "end"
OTHERWISE = "otherwise"
INVALID = "invalid"

Writes = Literal["text", "tool", "argument", "call", "choice", "answer"]
_ACTING: tuple[Writes, ...] = ("argument", "call")

_T = TypeVar("_T")


class WorkflowError(PrecacheError):
    """A workflow file is missing or says something that cannot be played."""


@dataclass(frozen=True, slots=True)
class TurnSpec:
    """One kind of turn: who writes, after which cue, until when, and what follows.

    `end` is written after the output (the stop string that the output left out). `next` maps
    what was written (an action, a choice) to the next turn.
    """

    name: str
    role: str
    max_tokens: int
    next: Mapping[str, str]
    cue: str = ""
    stop: tuple[str, ...] = ("\n",)
    end: str = "\n"
    writes: Writes = "text"

    @property
    def ends_step(self) -> bool:
        """Whether `{step}` counts up after this turn."""
        return self.writes in (*_ACTING, "choice")


@dataclass(frozen=True, slots=True)
class ActionSpec:
    """What one action does: ask a tool, give the answer, or just say something.

    `follows` names the action that must come right before; `new_cycle` counts towards max_cycles.
    """

    name: str
    tool: bool = False
    answer: bool = False
    says: str | None = None
    follows: str | None = None
    new_cycle: bool = False


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where an episode ends in any case. From step `force_from` on, `force_tool` is chosen unasked."""

    max_steps: int = 15
    max_cycles: int = 3
    max_output_tokens: int = 2000
    max_context_tokens: int = 4096
    max_malformed: int = 3
    max_repeats: int = 3
    force_tool: str | None = None
    force_from: int = 1


@dataclass(frozen=True, slots=True)
class Workflow:
    """Everything that a task says about its agents."""

    name: str
    header: str
    start: str
    turns: Mapping[str, TurnSpec]
    actions: Mapping[str, ActionSpec] = field(default_factory=dict)
    observation: str = ""
    bounds: Bounds = field(default_factory=Bounds)

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles, in the order in which the turns name them."""
        return tuple(dict.fromkeys(turn.role for turn in self.turns.values()))

    @property
    def tools(self) -> tuple[str, ...]:
        """The names before the bracket: `Reflect` for `Reflect[right]`."""
        return tuple(dict.fromkeys(name.partition("[")[0] for name in self.actions))

    def action(self, tool: str, argument: str) -> ActionSpec | None:
        """Return the action that a call means: the most specific one, in any case of letters."""
        call = f"{tool}[{argument.strip().casefold()}]"
        exact = {name.casefold(): spec for name, spec in self.actions.items() if "[" in name}
        return exact.get(call.casefold()) or self.actions.get(tool)


def load_workflow(source: str | Path) -> Workflow:
    """Read a workflow: a YAML file, or the name of one that comes with precache.

    Raises WorkflowError naming the file and the key.
    """
    path = Path(source)
    if path.suffix not in (".yaml", ".yml"):
        path = _shipped(str(source))
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WorkflowError(f"workflow {source}: {path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise WorkflowError(f"workflow {path} is not YAML: {error}") from error
    try:
        return parse_workflow(data)
    except WorkflowError as error:
        raise WorkflowError(f"workflow {path}: {error}") from error


def _shipped(name: str) -> Path:
    folder = Path(str(files("precache.agents") / "workflows"))
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in names:
        raise WorkflowError(f"workflow: got {name!r}, expected a .yaml file or one of {names}")
    return folder / f"{name}.yaml"


def parse_workflow(data: Any) -> Workflow:
    """Build the checked workflow from what the YAML holds. Raises WorkflowError."""
    values = _mapping(data, "the file")
    turns = {
        name: _build(TurnSpec, _turn_values(name, turn), f"turns.{name}")
        for name, turn in _mapping(values.get("turns"), "turns").items()
    }
    actions = {
        name: _build(ActionSpec, {**_mapping(spec or {}, name), "name": name}, f"actions.{name}")
        for name, spec in _mapping(values.get("actions", {}), "actions").items()
    }
    bounds = _build(Bounds, _mapping(values.get("bounds", {}), "bounds"), "bounds")
    workflow = _build(
        Workflow, {**values, "turns": turns, "actions": actions, "bounds": bounds}, "the file"
    )
    _check(workflow)
    return workflow


def _turn_values(name: str, turn: Any) -> dict[str, Any]:
    values = dict(_mapping(turn, f"turns.{name}"))
    follows = values.get("next")
    values["next"] = {OTHERWISE: follows} if isinstance(follows, str) else follows
    if "stop" in values:
        values["stop"] = tuple(values["stop"])
    return {**values, "name": name}


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WorkflowError(f"{where}: got {type(value).__name__}, expected a mapping")
    return cast("dict[str, Any]", value)


def _build(kind: type[_T], values: Mapping[str, Any], where: str) -> _T:
    known = fields(cast("Any", kind))
    names = {item.name for item in known}
    required = {
        item.name for item in known if item.default is MISSING and item.default_factory is MISSING
    }
    if unknown := set(values) - names:
        raise WorkflowError(f"{where}: unknown keys {sorted(unknown)}, allowed are {sorted(names)}")
    if missing := required - set(values):
        raise WorkflowError(f"{where}: needs {sorted(missing)}")
    return kind(**values)


def _check(workflow: Workflow) -> None:
    """Refuse what the loop could not play."""
    if workflow.start not in workflow.turns:
        raise WorkflowError(f"start: {workflow.start!r} is none of {sorted(workflow.turns)}")
    for turn in workflow.turns.values():
        _check_turn(turn, workflow)
    for action in workflow.actions.values():
        if not re.fullmatch(r"\w+(\[[^\]]+\])?", action.name):
            raise WorkflowError(f"actions: {action.name!r} is neither Name nor Name[argument]")
    _check_fields(workflow.header, {"question", "options"}, "header")
    _check_fields(workflow.observation, {"step", "text"}, "observation")
    _check_bounds(workflow)


def _check_fields(template: str, allowed: set[str], where: str) -> None:
    try:
        used = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
    except ValueError as error:
        raise WorkflowError(f"{where}: {error}") from error
    if unknown := used - allowed:
        raise WorkflowError(f"{where}: got {sorted(unknown)}, allowed fields are {sorted(allowed)}")


def _check_turn(turn: TurnSpec, workflow: Workflow) -> None:
    where = f"turns.{turn.name}"
    if turn.writes not in get_args(Writes):
        raise WorkflowError(f"{where}.writes: got {turn.writes!r}, allowed are {get_args(Writes)}")
    _check_fields(turn.cue, {"step"}, f"{where}.cue")
    targets = _mapping(turn.next, f"{where}.next")
    if wrong := set(targets.values()) - set(workflow.turns) - {END}:
        raise WorkflowError(f"{where}.next: {sorted(wrong)} are no turns")
    needed = {INVALID} if turn.writes not in ("text", "answer") else set()
    needed |= {OTHERWISE} if turn.writes != "choice" else set()
    if missing := needed - set(targets):
        raise WorkflowError(f"{where}.next: needs {sorted(missing)}, as it writes {turn.writes}")
    if turn.writes in ("tool", *_ACTING) and not (workflow.actions and workflow.observation):
        raise WorkflowError(f"{where} writes {turn.writes}, which needs actions and observation")
    if turn.writes == "tool" and workflow.turns[targets[OTHERWISE]].writes != "argument":
        raise WorkflowError(f"{where} writes a tool; the turn after it must write its argument")
    try:
        SamplingParams(max_tokens=turn.max_tokens, stop=turn.stop)
    except PrecacheError as error:
        raise WorkflowError(f"{where}.{error}") from error


def _check_bounds(workflow: Workflow) -> None:
    for item in fields(Bounds):
        value = getattr(workflow.bounds, item.name)
        if item.name != "force_tool" and (type(value) is not int or value < 1):
            raise WorkflowError(f"bounds.{item.name}: got {value!r}, expected an integer from 1")
    forced = workflow.bounds.force_tool
    if forced is not None and forced not in workflow.tools:
        raise WorkflowError(f"bounds.force_tool: {forced!r} is none of {list(workflow.tools)}")
