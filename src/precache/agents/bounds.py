"""What an episode has used so far, and whether its workflow lets it go on."""

from __future__ import annotations

from precache.agents.record import EpisodeRecord, Outcome, TurnRecord
from precache.agents.workflow import TurnSpec, Workflow

CHARS_PER_TOKEN = 3  # for endpoints that report no usage; too few rather than too many


class Spending:
    """Counts steps, output tokens and unreadable outputs in a row. Tokens are estimated where no usage is reported."""

    def __init__(self, workflow: Workflow) -> None:
        self._bounds = workflow.bounds
        self._max_turns = workflow.bounds.max_steps * len(workflow.turns)
        self._output_tokens = 0
        self._invalid_in_a_row = 0
        self.step = 1

    def count_turn(self, turn: TurnRecord) -> None:
        """Add what a turn wrote."""
        self._output_tokens += (
            len(turn.text) // CHARS_PER_TOKEN
            if turn.usage is None
            else turn.usage.completion_tokens
        )

    def end_turn(self, spec: TurnSpec, *, invalid: bool) -> None:
        """A step ends after an action, a choice, or an output that could not be read."""
        if invalid:
            self._invalid_in_a_row += 1
        elif spec.ends_step:
            self._invalid_in_a_row = 0
        self.step += invalid or spec.ends_step

    def reached(
        self, spec: TurnSpec, record: EpisodeRecord, num_chars: int, *, repeating: bool
    ) -> Outcome | None:
        """Return the bound that forbids this turn on a text of that many characters, or None."""
        bounds = self._bounds
        context = _context_tokens(record, num_chars)
        reached: dict[Outcome, bool] = {
            "max_steps": self.step > bounds.max_steps or len(record.turns) >= self._max_turns,
            "max_cycles": record.cycles >= bounds.max_cycles,
            "max_output_tokens": self._output_tokens >= bounds.max_output_tokens,
            "max_context_tokens": context + spec.max_tokens > bounds.max_context_tokens,
            "malformed": self._invalid_in_a_row >= bounds.max_malformed,
            "repeating": repeating,
        }
        return next((outcome for outcome, is_reached in reached.items() if is_reached), None)


def _context_tokens(record: EpisodeRecord, num_chars: int) -> int:
    """Tokens of the text: counted at the last turn, estimated for what came after it."""
    last = record.turns[-1] if record.turns else None
    if last is None or last.usage is None:
        return num_chars // CHARS_PER_TOKEN
    newer = num_chars - last.prompt_chars - len(last.written)
    return last.usage.prompt_tokens + last.usage.completion_tokens + newer // CHARS_PER_TOKEN
