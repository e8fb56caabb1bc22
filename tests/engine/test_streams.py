"""Invariant 3, second half: streams, threads and their order change nothing; and what a stream shows of the text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from precache import Engine, GenerationChunk, GenerationOutput, SamplingParams
from tests.engine.setup import Setup
from tests.engine.trajectories import METHODS, TOLERANCE, UNCHANGING, tokens
from tests.reference.models import EOS_TOKEN_ID

PREFIX = tokens(24, seed=4)
# (agent, prompt) of turns on one shared prefix, and of one that has nothing to do with it
TURNS = (
    ("action", [*PREFIX, *tokens(3, seed=5)]),
    ("reflect", [*PREFIX, *tokens(5, seed=6)]),
    ("plan", [*PREFIX[:15], *tokens(4, seed=7)]),
    ("action", tokens(19, seed=8)),
)


def start(engine: Engine, agent: str, prompt: Sequence[int]) -> Iterator[GenerationChunk]:
    return engine.stream(agent, prompt, max_tokens=5, ignore_eos=True, logprobs=20)


def finish(chunks: Iterator[GenerationChunk]) -> GenerationOutput:
    output = [chunk.output for chunk in chunks][-1]
    assert output is not None
    return output


def warm(setup: Setup, policy: str, schedule: str | None) -> Engine:
    engine = setup.engine(policy, schedule)
    engine.score("plan", PREFIX, tokens(2, seed=9))
    return engine


def alone(setup: Setup, policy: str, schedule: str | None, index: int) -> GenerationOutput:
    with warm(setup, policy, schedule) as engine:
        return finish(start(engine, *TURNS[index]))


def assert_same(one: GenerationOutput, other: GenerationOutput) -> None:
    assert one.token_ids == other.token_ids
    assert one.usage.cached_tokens == other.usage.cached_tokens
    for ours, theirs in zip(one.logprobs, other.logprobs, strict=True):
        expected = dict(theirs.top)
        values = [abs(value - expected[token]) for token, value in ours.top if token in expected]
        assert len(values) >= 19
        assert max(values) < TOLERANCE


@pytest.mark.parametrize(("policy", "schedule"), UNCHANGING)
def test_interleaved_streams_equal_each_alone(
    llama: Setup, policy: str, schedule: str | None
) -> None:
    with warm(llama, policy, schedule) as engine:
        streams = [start(engine, *turn) for turn in TURNS]
        outputs: dict[int, GenerationOutput] = {}
        while len(outputs) < len(streams):
            for index, stream in enumerate(streams):
                chunk = next(stream, None)
                if chunk is not None and chunk.output is not None:
                    outputs[index] = chunk.output
        assert not any(session.busy for session in engine.sessions())
    for index, output in outputs.items():
        assert_same(output, alone(llama, policy, schedule, index))
    if policy != "nonshared":
        assert [outputs[i].usage.cached_tokens for i in range(4)] == [24, 24, 15, 0]


@pytest.mark.parametrize(("policy", "schedule"), [METHODS[3], METHODS[5], METHODS[6]])
def test_threads_equal_each_alone(llama: Setup, policy: str, schedule: str | None) -> None:
    with warm(llama, policy, schedule) as engine, ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda turn: finish(start(engine, *turn)), TURNS))
        assert engine.stats().reused_tokens >= 24 + 15
    for index, output in enumerate(outputs):
        expected = alone(llama, policy, schedule, index)
        assert output.token_ids == expected.token_ids


@pytest.mark.parametrize(("policy", "schedule"), UNCHANGING[1:])
def test_a_request_while_a_stream_is_open_on_the_same_trajectory(
    llama: Setup, policy: str, schedule: str | None
) -> None:
    with warm(llama, policy, schedule) as engine:
        stream = start(engine, *TURNS[0])
        said = [next(stream).token_ids[0] for _ in range(3)]
        inside = engine.score("reflect", [*TURNS[0][1], *said[:2], *tokens(2)], tokens(2, seed=3))
        reused = engine.stats().reused_tokens
        output = finish(stream)
    assert reused == 24 + len(TURNS[0][1]) + 2  # the turn's own tokens are shared before it ends
    assert_same(output, alone(llama, policy, schedule, 0))
    with warm(llama, policy, schedule) as engine:
        engine.score("action", TURNS[0][1], said)
        later = engine.score("reflect", [*TURNS[0][1], *said[:2], *tokens(2)], tokens(2, seed=3))
    assert float((inside - later).abs().max()) < TOLERANCE


def test_a_long_prompt_lets_others_in_between_its_passes(
    llama: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tokens(40, seed=10)
    with llama.engine("prelrshared", prefill_chunk=4) as engine, ThreadPoolExecutor() as pool:
        forward, looks, seen = engine.model.forward, [], []

        def watched(*args: Any) -> Tensor:
            if looks:
                seen.append(
                    looks[0].result(timeout=60)[0].length
                )  # it had its turn before this pass
                looks.clear()
            logits = forward(*args)
            if len(seen) < 2:
                looks.append(pool.submit(engine.sessions))
                while engine._lock.waiting == 0:
                    time.sleep(0.001)
            return logits

        monkeypatch.setattr(engine.model, "forward", watched)
        output = engine.generate("plan", prompt, max_tokens=2, ignore_eos=True)
    assert seen == [4, 8]
    with llama.engine("prelrshared", prefill_chunk=4) as engine:
        undisturbed = engine.generate("plan", prompt, max_tokens=2, ignore_eos=True)
    assert output.token_ids == undisturbed.token_ids


def test_streamed_equals_generated(llama: Setup) -> None:
    engine = llama.engine()
    chunks = list(engine.stream("plan", PREFIX, max_tokens=12, temperature=1.0, seed=5))
    output = engine.generate("plan", PREFIX, max_tokens=12, temperature=1.0, seed=5)
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == output.token_ids
    assert "".join(chunk.text for chunk in chunks) == output.text
    assert [chunk.output is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert output.usage.cached_tokens == len(PREFIX) - 1


def test_a_seed_decides_the_draw_and_no_seed_does_not(llama: Setup) -> None:
    engine = llama.engine()

    def draw(seed: int | None) -> tuple[int, ...]:
        sampling = {"max_tokens": 16, "temperature": 3.0, "ignore_eos": True}
        return engine.generate("plan", PREFIX, seed=seed, **sampling).token_ids

    assert draw(1) == draw(1)
    assert len({draw(1), draw(2), draw(None), draw(None)}) == 4


def test_cancelling_raises_before_the_next_pass_and_keeps_a_valid_prefix(llama: Setup) -> None:
    from threading import Event

    from precache.errors import TurnCancelledError

    engine, cancel = llama.engine(), Event()
    stream = engine.stream("plan", PREFIX, max_tokens=9, ignore_eos=True, cancel=cancel)
    next(stream)
    cancel.set()
    with pytest.raises(TurnCancelledError):
        next(stream)
    (session,) = engine.sessions()
    assert session.token_ids == tuple(PREFIX)
    assert not session.busy


# -- text ------------------------------------------------------------------------------------------------------


def scripted(token_ids: Sequence[int]) -> Callable[[Sequence[int], Tensor], Tensor]:
    """A mask that leaves the turn no choice."""

    def force(so_far: Sequence[int], logits: Tensor) -> Tensor:
        forced = torch.full_like(logits, -torch.inf)
        forced[token_ids[len(so_far)]] = 0.0
        return forced

    return force


def say(
    setup: Setup, text: str, *, eos: bool = False, **sampling: object
) -> tuple[list[str], GenerationOutput]:
    """The streamed pieces, and the output, of a turn that says ``text``."""
    engine = setup.engine(adapters={})
    ids = [*setup.tokenizer.encode_prompt(text), *([EOS_TOKEN_ID] if eos else [])]
    params = SamplingParams(**{"max_tokens": len(ids), **sampling})  # type: ignore[arg-type]
    chunks = list(engine.stream("base", PREFIX, params=params, logits_mask=scripted(ids)))
    output = chunks[-1].output
    assert output is not None
    assert "".join(chunk.text for chunk in chunks) == output.text
    return [chunk.text for chunk in chunks if chunk.text], output


def test_nothing_of_a_stop_string_is_shown(llama: Setup) -> None:
    pieces, output = say(llama, "x\nObservation: 7", stop=("\nObservation",))
    assert (pieces, output.finish_reason) == (["x"], "stop")
    assert output.usage.completion_tokens == len("x\nObservation")


def test_text_held_for_a_stop_string_comes_out_at_the_end(llama: Setup) -> None:
    _, output = say(llama, "x\nObs", eos=True, stop=("\nObservation",))
    assert (output.text, output.finish_reason) == ("x\nObs", "stop")
    assert output.token_ids[-1] == EOS_TOKEN_ID


def test_a_stop_string_does_not_switch_eos_off(llama: Setup) -> None:
    _, output = say(llama, "ab", eos=True, stop=("never",), max_tokens=50)
    assert (output.text, output.finish_reason) == ("ab", "stop")


def test_eos_at_the_limit_is_a_stop_and_the_limit_alone_is_length(llama: Setup) -> None:
    assert say(llama, "abc", eos=True)[1].finish_reason == "stop"
    assert say(llama, "abcd")[1].finish_reason == "length"
    assert say(llama, "abc", eos=True, ignore_eos=True)[1].finish_reason == "length"


def test_characters_are_never_split(llama: Setup) -> None:
    pieces, output = say(llama, "aαβ")
    assert pieces == ["a", "α", "β"]
    assert len(output.token_ids) == 5


def test_a_character_cut_by_the_limit_is_marked(llama: Setup) -> None:
    pieces, output = say(llama, "aα", max_tokens=2)
    assert (pieces, output.text) == (["a", "\ufffd"], "a\ufffd")
    assert output.finish_reason == "length"
