"""Plays one episode of a workflow: whose turn it is, what the turn meant, what the tools answered.

Every role is given the same text so far; only the cue at its end and the model's name differ. So
the prefix is shared by construction, and a turn costs its new tokens only.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from precache.agents.client import CompletionClient, TurnOutput, TurnRefusedError, TurnRequest
from precache.agents.reading import (
    Call,
    Malformed,
    drop_repetition,
    read_call,
    read_choice,
    read_tool,
)
from precache.agents.record import EpisodeRecord, Outcome, ToolCall, TurnRecord
from precache.agents.tools import Tool, ToolResult, run_tool
from precache.agents.workflow import END, INVALID, OTHERWISE, TurnSpec, Workflow, WorkflowError
from precache.tasks.episodes import clip
from precache.tasks.trajectory import Segment

CHARS_PER_TOKEN = 3  # for endpoints that report no usage; too few rather than too many


@dataclass(frozen=True, slots=True)
class PlayOptions:
    """How an episode is played. Turns draw from seeds that follow `seed`."""

    temperature: float = 0.0
    seed: int = 0
    tool_timeout_s: float = 30.0


class _Reading(NamedTuple):
    """What one output meant. `choice` is the key of the turn's `next`."""

    written: str
    malformed: tuple[Malformed, ...]
    choice: str = OTHERWISE
    call: Call | None = None


class Episode:
    """One question and the text about it so far. `record` grows while `play` runs."""

    def __init__(
        self,
        workflow: Workflow,
        client: CompletionClient,
        question_id: str,
        fields: Mapping[str, str],
        tools: Mapping[str, Tool],
        options: PlayOptions | None = None,
    ) -> None:
        missing = [a.name for a in workflow.actions.values() if a.tool and a.name not in tools]
        if missing:
            raise WorkflowError(f"workflow {workflow.name}: no tool for the actions {missing}")
        self._workflow = workflow
        self._client = client
        self._tools = tools
        self._options = options or PlayOptions()
        self._step = 1
        self._tool = ""  # what the plan role chose for the argument to come
        self._last_calls: list[Call] = []
        self._num_invalid = 0  # in a row
        self._num_tokens = 0
        self.record = EpisodeRecord(question_id)
        self.text = ""
        self._write(None, workflow.header.format_map(fields))

    def play(self) -> Iterator[TurnRecord]:
        """Run the turns, and yield each when its text is written, before any tool runs.

        Raises EndpointError; a turn that the endpoint refuses ends the episode.
        """
        state = self._workflow.start
        while state != END:
            spec = self._workflow.turns[state]
            self.record.outcome = self._reached_bound(spec)
            if self.record.outcome is not None:
                return
            state = yield from self._turn(spec)
        self.record.outcome = self.record.outcome or "accepted"

    def _turn(self, spec: TurnSpec) -> Generator[TurnRecord, None, str]:
        """Play one turn and return (as the generator's value) the next one."""
        self._write(None, spec.cue.format(step=self._step))
        if self._must_force(spec):
            self._tool = self._workflow.bounds.force_tool or ""
            self._write(None, f" {self._tool}{spec.end}")
            return spec.next[OTHERWISE]
        try:
            output = self._client.complete(self._request(spec))
        except TurnRefusedError as error:
            self.record.outcome, self.record.error = "refused", str(error)
            return END
        reading = self._read(spec, output)
        yield self._keep(spec, output, reading)
        return self._go_on(spec, reading)

    def _request(self, spec: TurnSpec) -> TurnRequest:
        sampled = self._options.temperature > 0
        return TurnRequest(
            agent=spec.role,
            prompt=self.text,
            max_tokens=spec.max_tokens,
            stop=spec.stop,
            temperature=self._options.temperature,
            seed=self._options.seed + len(self.record.turns) if sampled else None,
        )

    # -- what a turn meant ---------------------------------------------------------------------

    def _read(self, spec: TurnSpec, output: TurnOutput) -> _Reading:
        if output.finish_reason != "length":
            return _READERS[spec.writes](self, spec, output.text)
        shorter = drop_repetition(output.text)
        found: Malformed = "unended" if shorter is None else "repetition"
        text = output.text if shorter is None else shorter
        reading = _READERS[spec.writes](self, spec, text)
        return reading._replace(malformed=(found, *reading.malformed))

    def _read_text(self, spec: TurnSpec, text: str) -> _Reading:
        return _Reading(text + spec.end, () if text.strip() else ("empty_text",))

    def _read_answer(self, spec: TurnSpec, text: str) -> _Reading:
        self.record.answer = text.strip()
        return self._read_text(spec, text)

    def _read_tool(self, spec: TurnSpec, text: str) -> _Reading:
        tool = read_tool(text, self._workflow.tools)
        if tool is None:
            problem: Malformed = "unknown_action" if text.strip() else "no_action"
            return _Reading(text + "\n", (problem,), INVALID)
        self._tool = tool
        return _Reading(text + spec.end, ())

    def _read_argument(self, spec: TurnSpec, text: str) -> _Reading:
        if not text.strip():
            return _Reading(text + spec.end, ("empty_argument",), INVALID)
        return _Reading(text + spec.end, (), call=Call(self._tool, text.strip()))

    def _read_call(self, spec: TurnSpec, text: str) -> _Reading:
        call = read_call(text, self._workflow.tools)
        if not isinstance(call, Call):
            return _Reading(text + spec.end, (call,), INVALID)
        return _Reading(text + spec.end, (), call=call)

    def _read_choice(self, spec: TurnSpec, text: str) -> _Reading:
        choice = read_choice(text, [key for key in spec.next if key != INVALID])
        if choice is None:
            return _Reading(text + spec.end, ("unknown_choice",), INVALID)
        return _Reading(text + spec.end, (), choice)

    def _keep(self, spec: TurnSpec, output: TurnOutput, reading: _Reading) -> TurnRecord:
        turn = TurnRecord(
            name=spec.name,
            role=spec.role,
            step=self._step,
            prompt_chars=len(self.text),
            text=output.text,
            written=reading.written,
            finish_reason=output.finish_reason,
            timings=output.timings,
            usage=output.usage,
            malformed=reading.malformed,
            prompt_token_ids=output.prompt_token_ids,
            token_ids=output.token_ids,
        )
        self._write(spec.role, reading.written)
        self.record.turns.append(turn)
        self.record.malformed.update(reading.malformed)
        self.record.steps = self._step
        self._num_tokens += _num_output_tokens(output)
        return turn

    # -- what follows --------------------------------------------------------------------------

    def _go_on(self, spec: TurnSpec, reading: _Reading) -> str:
        choice = reading.choice
        if reading.call is not None:
            choice = self._act(spec, reading.call)
        elif choice == INVALID and self._workflow.observation:
            self._observe(self._valid_actions())
        if choice == INVALID:
            self._num_invalid += 1
        elif spec.ends_step:
            self._num_invalid = 0
        if choice == INVALID or spec.ends_step:
            self._step += 1
        return spec.next[choice]

    def _act(self, spec: TurnSpec, call: Call) -> str:
        """Carry out an action and return the key of the next turn."""
        action = self._workflow.action(call.tool, call.argument)
        last_tool = self._last_calls[-1].tool if self._last_calls else None
        if action is None:
            return self._refuse("unknown_action", self._valid_actions())
        if action.follows not in (None, last_tool):
            text = f"Invalid action. {call.tool} only follows the {action.follows} action."
            return self._refuse("misplaced_action", text)
        self._last_calls.append(call)
        self.record.cycles += action.new_cycle
        if action.answer:
            self.record.answer = call.argument
        self._note(call, self._result(call, tool=action.tool, says=action.says))
        return next(key for key in (action.name, call.tool, OTHERWISE) if key in spec.next)

    def _result(self, call: Call, *, tool: bool, says: str | None) -> ToolResult:
        if not tool:
            return ToolResult(says or "", "builtin", 0.0)
        return run_tool(
            call.tool, self._tools[call.tool], call.argument, self._options.tool_timeout_s
        )

    def _note(self, call: Call, result: ToolResult) -> None:
        observation = clip(result.observation)
        if observation:
            self._observe(observation)
        self.record.tool_calls.append(
            ToolCall(
                self._step, call.tool, call.argument, observation, result.status, result.seconds
            )
        )

    def _refuse(self, problem: Malformed, observation: str) -> str:
        self.record.malformed[problem] += 1
        self._observe(observation)
        return INVALID

    def _valid_actions(self) -> str:
        names = " ".join(f"{tool}[...]" for tool in self._workflow.tools)
        return f"Invalid Action. Valid Actions are {names}"

    def _observe(self, text: str) -> None:
        self._write(None, self._workflow.observation.format(step=self._step, text=clip(text)))

    def _write(self, role: str | None, text: str) -> None:
        if not text:
            return
        self.text += text
        segments = self.record.segments
        if segments and segments[-1].role == role:
            segments[-1] = Segment(role, segments[-1].text + text)
        else:
            segments.append(Segment(role, text))

    # -- bounds --------------------------------------------------------------------------------

    def _must_force(self, spec: TurnSpec) -> bool:
        bounds = self._workflow.bounds
        late = self._step >= bounds.force_from
        return spec.writes == "tool" and bounds.force_tool is not None and late

    def _reached_bound(self, spec: TurnSpec) -> Outcome | None:
        bounds, num_turns = self._workflow.bounds, len(self.record.turns)
        reached: dict[Outcome, bool] = {
            "max_steps": self._step > bounds.max_steps
            or num_turns >= bounds.max_steps * len(self._workflow.turns),
            "max_cycles": self.record.cycles >= bounds.max_cycles,
            "max_output_tokens": self._num_tokens >= bounds.max_output_tokens,
            "max_context_tokens": self._context() + spec.max_tokens > bounds.max_context_tokens,
            "malformed": self._num_invalid >= bounds.max_malformed,
            "repeating": self._is_repeating(bounds.max_repeats),
        }
        return next((outcome for outcome, is_reached in reached.items() if is_reached), None)

    def _context(self) -> int:
        """Tokens so far: counted at the last turn, estimated for what came after it."""
        last = self.record.turns[-1] if self.record.turns else None
        if last is None or last.usage is None:
            return len(self.text) // CHARS_PER_TOKEN
        newer = len(self.text) - last.prompt_chars - len(last.written)
        counted = last.usage.prompt_tokens + last.usage.completion_tokens
        return counted + newer // CHARS_PER_TOKEN

    def _is_repeating(self, max_repeats: int) -> bool:
        last = self._last_calls[-max_repeats:]
        return len(last) == max_repeats > 1 and len(set(last)) == 1


def _num_output_tokens(output: TurnOutput) -> int:
    if output.usage is None:
        return len(output.text) // CHARS_PER_TOKEN
    return output.usage.completion_tokens


_READERS = {
    "text": Episode._read_text,
    "answer": Episode._read_answer,
    "tool": Episode._read_tool,
    "argument": Episode._read_argument,
    "call": Episode._read_call,
    "choice": Episode._read_choice,
}
