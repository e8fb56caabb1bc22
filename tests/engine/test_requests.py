"""Requests that cannot be served: each has its own error that says what, got and allowed, and harms nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from precache import Engine, PrecacheError, SamplingParams
from precache.errors import (
    ContextLengthError,
    EmptyPromptError,
    EngineClosedError,
    InvalidRequestError,
    SamplingParamsError,
    TokenIdError,
    UnknownAdapterError,
)
from tests.engine.setup import Setup
from tests.engine.trajectories import (
    METHODS,
    TOLERANCE,
    only_trajectory,
    stored,
    stored_difference,
    tokens,
)

WINDOW = 64
PROMPT = tokens(20)
GOOD: dict[str, Any] = {"agent": "plan", "prompt": PROMPT}
NAMES = r"\['action', 'base', 'plan', 'reflect'\]"

BAD: list[tuple[dict[str, Any], type[PrecacheError], str]] = [
    ({"prompt": []}, EmptyPromptError, "got 0 tokens"),
    ({"prompt": ""}, EmptyPromptError, "got 0 tokens"),
    ({"prompt": tokens(WINDOW)}, ContextLengthError, "got 64 prompt tokens, .* is 64 tokens"),
    ({"prompt": tokens(WINDOW + 9)}, ContextLengthError, "got 73 prompt tokens"),
    ({"max_tokens": 45}, ContextLengthError, "20 prompt tokens and max_tokens=45, .* is 64"),
    (
        {"max_tokens": 0},
        SamplingParamsError,
        "max_tokens: got 0, allowed is an integer of at least 1",
    ),
    ({"max_tokens": -3}, SamplingParamsError, "max_tokens: got -3"),
    ({"max_tokens": True}, SamplingParamsError, "max_tokens: got True"),
    ({"max_tokens": 2.0}, SamplingParamsError, "max_tokens: got 2.0"),
    ({"agent": " plan"}, UnknownAdapterError, f"got ' plan', loaded are {NAMES}"),
    ({"agent": "Plan"}, UnknownAdapterError, f"got 'Plan', loaded are {NAMES}"),
    ({"agent": ""}, UnknownAdapterError, "got ''"),
    ({"agent": None}, UnknownAdapterError, "got None"),
    ({"agent": ["plan"]}, UnknownAdapterError, r"got \['plan'\]"),
    ({"prompt": [5, 128]}, TokenIdError, "got 128 at position 1, .* 0 to 127"),
    ({"prompt": [5, 99999999]}, TokenIdError, "got 99999999 at position 1"),
    ({"prompt": [-1, 5]}, TokenIdError, "got -1 at position 0"),
    ({"prompt": [5, True]}, TokenIdError, "got True at position 1"),
    ({"prompt": [5, 1.5]}, TokenIdError, "got 1.5 at position 1"),
    ({"prompt": [5, "a"]}, TokenIdError, "got 'a' at position 1"),
    ({"prompt": {"role": "user", "content": "a"}}, InvalidRequestError, "a list of messages"),
    ({"prompt": None}, InvalidRequestError, "prompt: got NoneType"),
    ({"prompt": 5}, InvalidRequestError, "prompt: got int"),
    ({"prompt": b"text"}, InvalidRequestError, "prompt: got bytes, allowed are text"),
    ({"beams": 4}, InvalidRequestError, r"unknown sampling parameters: got \['beams'\]"),
    ({"params": {"max_tokens": 3}}, InvalidRequestError, "params: got dict, allowed is a Sampl"),
    ({"params": SamplingParams(), "max_tokens": 3}, InvalidRequestError, "not both"),
]

BAD_PARAMS: list[tuple[str, object]] = [
    ("temperature", -1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_k", -1),
    ("top_k", 1.0),
    ("min_p", 1.5),
    ("presence_penalty", 3),
    ("frequency_penalty", -2.5),
    ("repetition_penalty", 0),
    ("seed", 1.5),
    ("seed", 2**63),
    ("logprobs", -1),
    ("logprobs", 10**9),
    ("stop", ("",)),
    ("stop", ("x" * 257,)),
    ("stop", ("x",) * 17),
    ("stop", "word"),
    ("stop", 5),
    ("stop_token_ids", (-1,)),
    ("stop_token_ids", (True,)),
    ("stop_token_ids", 5),
]


@pytest.fixture(scope="module")
def engine(llama: Setup) -> Engine:
    engine = llama.engine(context_window=WINDOW)
    engine.score("plan", PROMPT, tokens(2))
    return engine


def assert_refused(
    engine: Engine, request: dict[str, Any], error: type[PrecacheError], match: str
) -> None:
    before = stored(engine, only_trajectory(engine))
    with pytest.raises(error, match=match):
        engine.generate(**{**GOOD, **request})
    with pytest.raises(error, match=match):
        engine.stream(**{**GOOD, **request})  # before anything is streamed
    assert stored_difference(stored(engine, only_trajectory(engine)), before) == 0
    assert engine.generate("plan", PROMPT, max_tokens=1).usage.cached_tokens == 19
    engine.score("plan", PROMPT, tokens(2))


@pytest.mark.parametrize(("request_", "error", "match"), BAD, ids=[str(b[0])[:40] for b in BAD])
def test_a_bad_request_is_refused_and_harms_nothing(
    engine: Engine, request_: dict[str, Any], error: type[PrecacheError], match: str
) -> None:
    assert_refused(engine, request_, error, match)


@pytest.mark.parametrize(("field", "value"), BAD_PARAMS)
def test_a_sampling_parameter_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(SamplingParamsError, match=f"{field}: got .*, (allowed is|only)"):
        SamplingParams(**{field: value})


def test_a_bad_stop_reaches_the_same_check_through_generate(engine: Engine) -> None:
    assert_refused(engine, {"stop": 5}, SamplingParamsError, "stop: got 5")
    assert_refused(engine, {"stop_token_ids": "a"}, SamplingParamsError, "stop_token_ids: got 'a'")
    assert engine.generate(**GOOD, stop="x", max_tokens=1).finish_reason in ("stop", "length")
    assert engine.generate(**GOOD, stop=None, max_tokens=1).finish_reason in ("stop", "length")


@pytest.mark.parametrize(
    ("output", "error", "match"),
    [
        ([], InvalidRequestError, "got 0 output tokens, need at least 1"),
        ([128], TokenIdError, "got 128"),
        ([3] * 45, ContextLengthError, "max_tokens=45"),
    ],
)
def test_a_bad_score_is_refused(
    engine: Engine, output: list[int], error: type[PrecacheError], match: str
) -> None:
    before = stored(engine, only_trajectory(engine))
    with pytest.raises(error, match=match):
        engine.score("plan", PROMPT, output)
    assert stored_difference(stored(engine, only_trajectory(engine)), before) == 0


@pytest.mark.parametrize(("policy", "schedule"), METHODS)
def test_the_last_place_in_the_window_yields_one_token_cold_and_cached(
    llama: Setup, policy: str, schedule: str | None
) -> None:
    with llama.engine(policy, schedule, context_window=WINDOW) as engine:
        cold = engine.generate("plan", tokens(WINDOW - 1), logprobs=5)
        cached = engine.generate("plan", tokens(WINDOW - 1), logprobs=5)
        with pytest.raises(ContextLengthError):
            engine.generate("plan", tokens(WINDOW))
    assert len(cold.token_ids) == len(cached.token_ids) == 1
    assert cold.finish_reason in ("length", "stop")
    assert cached.usage.cached_tokens == WINDOW - 2
    if (
        policy != "rebaseshared"
    ):  # there a turn reads its own tokens adapted, and later ones neutral
        assert abs(cold.logprobs[0].logprob - cached.logprobs[0].logprob) < TOLERANCE


def test_no_limit_means_the_rest_of_the_window(llama: Setup) -> None:
    engine = llama.engine(context_window=WINDOW)
    out = engine.generate("plan", PROMPT, ignore_eos=True)
    assert len(out.token_ids) == WINDOW - len(PROMPT)
    assert out.finish_reason == "length"


def test_without_a_tokenizer_only_token_ids_are_taken(llama: Setup) -> None:
    with_text = llama.engine(adapters={})
    engine = Engine(with_text.model, None, with_text.config)
    assert engine.generate("base", PROMPT, max_tokens=2).text == ""
    for prompt in ("text", [{"role": "user", "content": "a"}]):
        with pytest.raises(InvalidRequestError, match="the model has no tokenizer"):
            engine.generate("base", prompt, max_tokens=2)
    with pytest.raises(TokenIdError, match="got True"):
        engine.generate("base", [True], max_tokens=2)
    with pytest.raises(SamplingParamsError, match="stop: .* no tokenizer"):
        engine.generate("base", PROMPT, max_tokens=2, stop="x")


def test_a_closed_engine_refuses_everything(llama: Setup, tmp_path: Path) -> None:
    engine = llama.engine()
    open_stream = engine.stream("plan", PROMPT, max_tokens=2)
    engine.score("plan", PROMPT, tokens(2))
    engine.close()
    engine.close()
    for refused in (
        lambda: engine.generate("plan", PROMPT),
        lambda: engine.stream("plan", PROMPT),
        lambda: engine.score("plan", PROMPT, tokens(2)),
        lambda: next(open_stream),
        lambda: engine.add_adapter("critic", llama.adapters()["plan"]),
        lambda: engine.save_session("session-1", tmp_path / "a"),
        lambda: engine.load_session(tmp_path / "a"),
    ):
        with pytest.raises(EngineClosedError):
            refused()
    assert engine.stats().bytes_held == 0
