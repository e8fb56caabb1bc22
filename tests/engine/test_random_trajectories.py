"""Random turns, turn-offs, closed streams, faults and newcomers, each step against the reference."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

from precache import Engine
from tests.engine.faults import Fault, failing_layer
from tests.engine.setup import AGENTS, Setup
from tests.engine.trajectories import METHODS, TOLERANCE, answer, difference, tokens, turn
from tests.reference.lora import read_adapter
from tests.reference.policies import ReferenceState


class Walk:
    """One trajectory under random treatment; ``ids`` are its tokens, cached or not."""

    def __init__(self, engine: Engine, state: ReferenceState, seed: int) -> None:
        self.engine = engine
        self.state = state
        self.rng = random.Random(seed)
        self.ids = tokens(3, seed)

    def new(self, most: int) -> list[int]:
        return tokens(self.rng.randrange(1, most), self.rng.randrange(10**6))

    def agent(self) -> str:
        return self.rng.choice((*AGENTS, "base"))

    def step(self) -> None:
        self.rng.choice((self.say, self.say, self.turn_off, self.close_early, self.fail))()

    def say(self) -> None:
        agent, prompt, output = self.agent(), [*self.ids, *self.new(6)], self.new(5)
        logits = self.engine.score(agent, prompt, output)
        assert difference([logits], [answer(self.state, agent, prompt, output)]) < TOLERANCE
        self.ids = [*prompt, *output]

    def turn_off(self) -> None:
        """Go on from somewhere in the middle, with another token than before."""
        keep = self.rng.randrange(1, len(self.ids))
        self.ids = [*self.ids[:keep], 9 if self.ids[keep] == 8 else 8]
        self.state.truncate(min(keep, len(self.state.tokens)))
        self.say()

    def close_early(self) -> None:
        agent, prompt = self.agent(), [*self.ids, *self.new(6)]
        stream = self.engine.stream(agent, prompt, max_tokens=9, ignore_eos=True)
        said = [next(stream).token_ids[0] for _ in range(self.rng.randrange(1, 4))]
        stream.close()
        answer(self.state, agent, prompt, said)
        self.ids = [*prompt, *said]

    def fail(self) -> None:
        agent, prompt = self.agent(), [*self.ids, *self.new(9)]
        held = len(self.state.tokens)
        with (
            self.engine.no_idle_work(),
            failing_layer(self.engine, self.rng.randrange(1, 5)),
            suppress(Fault),
        ):
            self.engine.score(agent, prompt, [9])
        self.ids = prompt
        if self.engine.policy.name == "nonshared":
            return  # every agent has its own; the reference computes each anew
        cached = max((session.length for session in self.engine.sessions()), default=0)
        self.state.catch_up(None if agent == "base" else agent, min(cached, held))
        if cached > held:
            turn(self.state, agent, prompt[held:cached])
        self.state.truncate(min(cached, len(self.state.tokens)))


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("policy", "schedule"), METHODS)
def test_every_step_of_a_random_walk_follows_the_definition(
    llama: Setup, policy: str, schedule: str | None, seed: int
) -> None:
    label = "qv" if seed % 2 else "mixed"
    adapters = llama.adapters(label)
    state = llama.reference(policy, adapters)
    with llama.engine(policy, schedule, adapters, prefill_chunk=4, growth_tokens=8) as engine:
        walk = Walk(engine, state, seed)
        for _ in range(18):
            walk.step()
        engine.replace_adapter("plan", llama.other_adapter())
        state.add_adapter("plan", read_adapter(llama.other_adapter()))
        prompt = [*walk.ids, *tokens(3)]
        logits = engine.score("plan", prompt, tokens(2))
        assert difference([logits], [answer(state, "plan", prompt, tokens(2))]) < TOLERANCE
        assert engine.stats().reused_tokens > 100
        assert engine.stats().bytes_held <= engine.stats().budget
