"""Teacher-forced mode: recorded episodes are said again, word by word, by the agents that wrote them.

So policies are compared on identical text: what differs is only what each agent thinks of the next
token. Natural mode (`loop.py`) is where a policy also changes what happens next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from precache.agents.client import CompletionClient, ForcedOutput, TurnRequest
from precache.agents.workflow import Workflow
from precache.tasks.trajectory import Trajectory, Turn

EXTRA_TOKENS = 8  # over the recorded length, for an endpoint that writes on its own


@dataclass(frozen=True, slots=True)
class ForcedTurn:
    """One replayed turn. `is_answer`: it is the argument of the action that answers."""

    role: str
    is_answer: bool
    output: ForcedOutput


def replay(
    client: CompletionClient, workflow: Workflow, trajectory: Trajectory
) -> Iterator[ForcedTurn]:
    """Force every turn of a trajectory, in order. Raises EndpointError and TurnRefusedError."""
    openings = tuple(f"{a.name}[" for a in workflow.actions.values() if a.answer)
    for turn in trajectory.turns():
        request = TurnRequest(
            agent=turn.role,
            prompt=turn.prompt,
            max_tokens=_max_tokens(turn),
            stop=_stop(workflow, turn),
        )
        yield ForcedTurn(
            turn.role, turn.prompt.endswith(openings), client.force(request, turn.target)
        )


def _stop(workflow: Workflow, turn: Turn) -> tuple[str, ...]:
    """Return the stop strings of the role's turn whose ending the recorded text has."""
    fitting = [
        spec
        for spec in workflow.turns.values()
        if spec.role == turn.role and spec.end and turn.target.endswith(spec.end)
    ]
    return max(fitting, key=lambda spec: len(spec.end)).stop if fitting else ("\n",)


def _max_tokens(turn: Turn) -> int:
    """A token is at least one character, so the recorded turn always fits."""
    return len(turn.target) + EXTRA_TOKENS
