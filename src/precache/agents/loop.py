"""Plays one episode of a workflow: whose turn it is, what goes into the text, what follows.

Every role is given the same text so far; only the cue at its end and the model's name differ. So
the prefix is shared by construction, and a turn costs its new tokens only.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass

from precache.agents.actions import Actions
from precache.agents.bounds import Spending
from precache.agents.client import CompletionClient, TurnOutput, TurnRefusedError, TurnRequest
from precache.agents.outputs import Reading, read_output
from precache.agents.reading import Call
from precache.agents.record import EpisodeRecord, TurnRecord
from precache.agents.tools import Tool
from precache.agents.workflow import END, INVALID, OTHERWISE, TurnSpec, Workflow
from precache.tasks.episodes import clip
from precache.tasks.trajectory import Segment


@dataclass(frozen=True, slots=True)
class PlayOptions:
    """How an episode is played. Turns draw from seeds that follow `seed`."""

    temperature: float = 0.0
    seed: int = 0
    tool_timeout_s: float = 30.0


class Episode:
    """One question and the text about it so far. `record` grows while `play` runs.

    Raises WorkflowError if an action has no tool.
    """

    def __init__(
        self,
        workflow: Workflow,
        client: CompletionClient,
        question_id: str,
        fields: Mapping[str, str],
        tools: Mapping[str, Tool],
        options: PlayOptions | None = None,
    ) -> None:
        self._workflow = workflow
        self._client = client
        self._options = options or PlayOptions()
        self._actions = Actions(workflow, tools, self._options.tool_timeout_s)
        self._spending = Spending(workflow)
        self._tool = ""  # what the plan role chose for the argument to come
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
            self.record.outcome = self._spending.reached(
                spec, self.record, len(self.text), repeating=self._actions.is_repeating()
            )
            if self.record.outcome is not None:
                return
            state = yield from self._turn(spec)
        self.record.outcome = self.record.outcome or "accepted"

    def _turn(self, spec: TurnSpec) -> Generator[TurnRecord, None, str]:
        """Play one turn and return (as the generator's value) the next one."""
        self._write(None, spec.cue.format(step=self._spending.step))
        if self._must_force(spec):
            self._tool = self._workflow.bounds.force_tool or ""
            self._write(None, f" {self._tool}{spec.end}")
            return spec.next[OTHERWISE]
        try:
            output = self._client.complete(self._request(spec))
        except TurnRefusedError as error:
            self.record.outcome, self.record.error = "refused", str(error)
            return END
        reading = read_output(self._workflow, spec, self._tool, output)
        yield self._keep(spec, output, reading)
        return self._go_on(spec, reading)

    def _must_force(self, spec: TurnSpec) -> bool:
        bounds = self._workflow.bounds
        late = self._spending.step >= bounds.force_from
        return spec.writes == "tool" and bounds.force_tool is not None and late

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

    def _keep(self, spec: TurnSpec, output: TurnOutput, reading: Reading) -> TurnRecord:
        """Write what the turn said into the text and the record."""
        record = self.record
        turn = TurnRecord(
            name=spec.name,
            role=spec.role,
            step=self._spending.step,
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
        self._spending.count_turn(turn)
        self._tool = reading.tool or self._tool
        record.turns.append(turn)
        record.malformed.update(reading.malformed)
        record.steps = self._spending.step
        record.answer = record.answer if reading.answer is None else reading.answer
        return turn

    def _go_on(self, spec: TurnSpec, reading: Reading) -> str:
        """Do what the turn asked for and return the next turn."""
        choice = reading.choice
        if reading.call is not None:
            choice = self._act(spec, reading.call)
        elif choice == INVALID and self._workflow.observation:
            self._observe(self._actions.valid_actions())
        self._spending.end_turn(spec, invalid=choice == INVALID)
        return spec.next[choice]

    def _act(self, spec: TurnSpec, call: Call) -> str:
        effect = self._actions.carry_out(spec, call, self._spending.step)
        record = self.record
        record.malformed.update([effect.malformed] if effect.malformed else [])
        record.tool_calls += [effect.done] if effect.done else []
        record.answer = record.answer if effect.answer is None else effect.answer
        record.cycles += effect.new_cycle
        self._observe(effect.observation)
        return effect.choice

    def _observe(self, text: str) -> None:
        if text:
            step = self._spending.step
            self._write(None, self._workflow.observation.format(step=step, text=clip(text)))

    def _write(self, role: str | None, text: str) -> None:
        if not text:
            return
        self.text += text
        segments = self.record.segments
        if segments and segments[-1].role == role:
            segments[-1] = Segment(role, segments[-1].text + text)
        else:
            segments.append(Segment(role, text))
