"""Plays one question: the roles take turns over one trajectory text until an answer has been judged.

Every role is given the same text so far; only the cue at its end says whose turn it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from precache import Engine, GenerationOutput
from precache.demo.question import DemoQuestion
from precache.tasks.scienceqa import SCIENCEQA
from precache.tasks.task import action_cue, observation_line, thought_cue

MAX_STEPS = 4
THOUGHT_TOKENS, TOOL_TOKENS, ARGUMENT_TOKENS = 48, 8, 32
ASK_TO_REFLECT = "Please reflect your answer."


@dataclass(frozen=True)
class DemoTurn:
    """One finished turn and what the agent wrote."""

    agent: str
    text: str
    output: GenerationOutput


class DemoEpisode:
    """The text so far, and who may add to it."""

    def __init__(self, engine: Engine, question: DemoQuestion) -> None:
        self._engine = engine
        self._question = question
        self.text = SCIENCEQA.header(question.question, question.options)

    def play(self) -> Iterator[DemoTurn]:
        """Yield the turns of at most MAX_STEPS steps and the reflection on the answer."""
        for number in range(1, MAX_STEPS + 1):
            yield self._turn("plan", thought_cue(number), "\n", THOUGHT_TOKENS)
            yield from self._act(number, last=number == MAX_STEPS)
            if self.text.endswith(f"{ASK_TO_REFLECT}\n"):
                yield from self._reflect(number + 1)
                return

    def _act(self, number: int, *, last: bool) -> Iterator[DemoTurn]:
        if last:  # the demo ends: the plan role may not search for ever
            self.text += f"{action_cue(number)} Finish["
            tool = "Finish"
        else:
            turn = self._turn("plan", action_cue(number), "[", TOOL_TOKENS)
            yield turn
            tool = turn.text.strip()
        yield self._turn("action", "", "]", ARGUMENT_TOKENS, end="]\n")
        answers = {**self._question.tools, "Finish": ASK_TO_REFLECT}
        answer = answers.get(tool, f"There is no tool {tool!r}.")
        self.text += observation_line(number, answer)

    def _reflect(self, number: int) -> Iterator[DemoTurn]:
        yield self._turn("reflect", thought_cue(number), "\n", THOUGHT_TOKENS)
        yield self._turn("reflect", action_cue(number), "\n", ARGUMENT_TOKENS)

    def _turn(
        self, agent: str, cue: str, stop: str, max_tokens: int, end: str | None = None
    ) -> DemoTurn:
        self.text += cue
        stops = [stop] if stop == "\n" else [stop, "\n"]
        output = self._engine.generate(agent, self.text, max_tokens=max_tokens, stop=stops)
        self.text += output.text + (stop if end is None else end)
        return DemoTurn(agent, output.text, output)
