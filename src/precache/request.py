"""Plain data that goes into and comes out of a turn. No torch here, no behaviour beyond range checks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from precache.errors import SamplingParamsError

FinishReason = Literal["stop", "length"]

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_TOP_K = 1_000_000
MAX_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one turn are chosen and when they end.

    ``temperature`` 0 is greedy. ``max_tokens`` None means: as many as the context window has room for.
    ``seed`` None draws a fresh seed. Raises SamplingParamsError for a value outside its range.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_int("max_tokens", self.max_tokens, low=1, optional=True)
        _check_number("temperature", self.temperature, 0.0, 100.0)
        _check_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_int("top_k", self.top_k, low=0, high=MAX_TOP_K)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _check_int("seed", self.seed, low=-(2**63), high=2**63 - 1, optional=True)
        _check_int("logprobs", self.logprobs, low=0, high=MAX_LOGPROBS, optional=True)
        if not isinstance(self.stop, tuple):  # a bare string would be taken for its characters
            raise SamplingParamsError("stop", self.stop, "a tuple of strings")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise SamplingParamsError("stop", len(self.stop), f"at most {MAX_STOP_STRINGS} strings")
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS:
                raise SamplingParamsError("stop", text, f"strings of 1 to {MAX_STOP_CHARS} chars")
        if not isinstance(self.stop_token_ids, tuple):
            raise SamplingParamsError("stop_token_ids", self.stop_token_ids, "a tuple of token ids")
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, low=0)


def _check_number(
    name: str, got: object, low: float, high: float, *, open_low: bool = False
) -> None:
    allowed = (
        f"a number {'above' if open_low else 'from'} {low:g} {'up ' if open_low else ''}to {high:g}"
    )
    if isinstance(got, bool) or not isinstance(got, int | float) or not math.isfinite(got):
        raise SamplingParamsError(name, got, allowed)
    if got > high or got < low or (open_low and got == low):
        raise SamplingParamsError(name, got, allowed)


def _check_int(
    name: str,
    got: object,
    *,
    low: int,
    high: int | None = None,
    optional: bool = False,
) -> None:
    if got is None and optional:
        return
    allowed = f"an integer of at least {low}" if high is None else f"an integer {low} to {high}"
    if isinstance(got, bool) or not isinstance(got, int):
        raise SamplingParamsError(name, got, allowed)
    if got < low or (high is not None and got > high):
        raise SamplingParamsError(name, got, allowed)


@dataclass(frozen=True)
class Usage:
    """Token counts of one turn.

    ``cached_tokens`` of the ``prompt_tokens`` were reused, ``shared_tokens`` of those were written by another agent and
    ``catch_up_tokens`` of them had to be run again for the reader (its strip, or a part of k and v); ``neutral_tokens``
    were run with adapters off (deferred or beside the turn).

    By count, no clock: ``flops`` of all passes of the turn, ``catch_up_flops`` of those over reused tokens. These went
    through ``recomputed_token_layers`` (tokens times layers), and replaced the k and v of ``refreshed_kv_entries``
    (tokens times layers) in the shared cache.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    catch_up_tokens: int = 0
    neutral_tokens: int = 0
    shared_tokens: int = 0
    refreshed_kv_entries: int = 0
    recomputed_token_layers: int = 0
    catch_up_flops: int = 0
    flops: int = 0

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that this turn had to run before its first token."""
        return self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True)
class Timings:
    """Seconds. ``neutral_wait_s`` is the part of ``ttft_s`` spent finishing an earlier turn's neutral pass;
    ``neutral_s`` is what this turn's own neutral pass took after its last token."""

    ttft_s: float
    total_s: float
    neutral_wait_s: float = 0.0
    neutral_s: float = 0.0


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability (nats, before temperature and filters) of a sampled token and of the most likely ones."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class GenerationChunk:
    """A piece of a streamed turn: new text, the token ids behind it, and on the last one why it ended."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    output: GenerationOutput | None = None


@dataclass(frozen=True)
class GenerationOutput:
    """A finished turn. ``token_ids`` are all sampled tokens, including a final EOS if one was sampled."""

    adapter_name: str
    session_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    logprobs: tuple[TokenLogprob, ...] = field(default=())
