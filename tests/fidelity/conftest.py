"""A tiny random model with three strong adapters, and recordings of token ids that their agents say."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from precache.fidelity.recordings import RecordedTurn, Recording
from tests.engine.setup import Setup
from tests.engine.trajectories import Step, script

STEPS = (
    Step("plan", 17, 5),
    Step("action", 2, 3),
    Step("reflect", 6, 4),
    Step("plan", 1, 3),
    Step("action", 4, 6),
)


def recorded(seed: int, steps: Sequence[Step] = STEPS) -> Recording:
    """What the agents of ``steps`` say, at random."""
    token_ids: list[int] = []
    turns = []
    for agent, prompt, output in script(steps, seed):
        start = len(token_ids) + len(prompt)
        token_ids += [*prompt, *output]
        turns.append(RecordedTurn(agent, start, len(token_ids)))
    return Recording(f"q{seed}", tuple(token_ids), tuple(turns))


@pytest.fixture(scope="session")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup("llama", tmp_path_factory.mktemp("fidelity"))


@pytest.fixture(scope="session")
def recordings() -> list[Recording]:
    return [recorded(seed) for seed in range(3)]
