"""What one HTTP request asks of the engine, and the work that answers it: several prompts, several choices of each."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from precache.engine.engine import Engine
from precache.engine.sampler import LogitsMask
from precache.request import GenerationChunk, GenerationOutput, SamplingParams, TokenLogprob
from precache.server.monitor import Monitor

_log = logging.getLogger(__name__)
_SCORE_TOKENS = 256  # prompt tokens whose logits are held at one time


@dataclass(frozen=True)
class TurnPlan:
    """A checked request. ``model`` is the name in the request and in the answer, ``agent`` the engine's.

    ``make_mask`` makes the restriction of one choice's tokens; ``prompt_logprobs`` asks for those of the prompt too.
    ``generate`` False asks for nothing but them.
    """

    model: str
    agent: str
    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams
    num_choices: int = 1
    make_mask: Callable[[], LogitsMask] | None = None
    prompt_logprobs: int | None = None
    generate: bool = True


@dataclass(frozen=True)
class ChoiceChunk:
    """What one choice said next."""

    index: int
    prompt_index: int
    chunk: GenerationChunk


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of a prompt's tokens but the first, which has none."""

    prompt_index: int
    logprobs: tuple[TokenLogprob, ...]


Event = ChoiceChunk | PromptLogprobs


class TurnWork:
    """Runs a plan on the engine, and tells the monitor of every turn. Used once, in the queue's thread."""

    def __init__(self, engine: Engine, plan: TurnPlan, monitor: Monitor) -> None:
        self._engine = engine
        self._plan = plan
        self._monitor = monitor
        self._arrived = time.monotonic()

    def __call__(self, cancel: threading.Event) -> Generator[Event, None, None]:
        for prompt_index in range(len(self._plan.prompts)):
            if self._plan.prompt_logprobs is not None:
                yield from self._score(prompt_index, cancel)
            if self._plan.generate:
                yield from self._choices(prompt_index, cancel)

    def _choices(
        self, prompt_index: int, cancel: threading.Event
    ) -> Generator[ChoiceChunk, None, None]:
        plan = self._plan
        for choice in range(plan.num_choices):
            index = prompt_index * plan.num_choices + choice
            for chunk in self._turn(plan.prompts[prompt_index], choice, cancel):
                yield ChoiceChunk(index, prompt_index, chunk)

    def _turn(
        self, prompt: Sequence[int], choice: int, cancel: threading.Event
    ) -> Generator[GenerationChunk, None, None]:
        plan, monitor = self._plan, self._monitor
        seed = plan.params.seed
        params = plan.params if seed is None else replace(plan.params, seed=_offset(seed, choice))
        mask = None if plan.make_mask is None else plan.make_mask()
        record = monitor.begin(plan.model, plan.agent, prompt, time.monotonic() - self._arrived)
        try:
            for chunk in self._engine.stream(
                plan.agent, list(prompt), params=params, logits_mask=mask, cancel=cancel
            ):
                if chunk.output is not None:
                    _explain_empty(plan.model, chunk.output)
                    monitor.finish(record, chunk.output)
                else:
                    monitor.token(record)
                yield chunk
        except BaseException as error:
            monitor.fail(record, type(error).__name__)
            raise

    def _score(
        self, prompt_index: int, cancel: threading.Event
    ) -> Generator[PromptLogprobs, None, None]:
        prompt, found = list(self._plan.prompts[prompt_index]), []
        for start in range(1, len(prompt), _SCORE_TOKENS):
            if cancel.is_set():
                return
            output = prompt[start : start + _SCORE_TOKENS]
            logits = self._engine.score(self._plan.agent, prompt[:start], output)
            found += _prompt_logprobs(logits, output, self._plan.prompt_logprobs or 0)
        yield PromptLogprobs(prompt_index, tuple(found))


def _prompt_logprobs(logits: Tensor, token_ids: list[int], count: int) -> list[TokenLogprob]:
    values = torch.log_softmax(logits, dim=-1)
    best = values.topk(min(count, values.shape[-1]), dim=-1)
    rows = zip(token_ids, values, best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        TokenLogprob(token_id, float(row[token_id]), tuple(zip(ids, logprobs, strict=True)))
        for token_id, row, ids, logprobs in rows
    ]


def _offset(seed: int, choice: int) -> int:
    """Another seed for every choice, inside the range of seeds."""
    return (seed + choice + 2**63) % 2**64 - 2**63


def _explain_empty(model: str, output: GenerationOutput) -> None:
    if not output.text:
        _log.warning(
            "empty completion of %r: ended by %s after %d tokens (a stop string or the end of sequence came first)",
            model,
            output.finish_reason,
            len(output.token_ids),
        )
