"""The client that is handed an engine. Imports neither the engine nor torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from precache.agents.client import ForcedOutput, TurnOutput, TurnRefusedError, TurnRequest
from precache.chat import ChatTokenizer
from precache.errors import InvalidRequestError
from precache.request import GenerationOutput, SamplingParams


class EngineLike(Protocol):
    """What the client needs of `precache.Engine`."""

    tokenizer: ChatTokenizer | None

    def reset(self) -> None: ...

    def generate(
        self, agent: str, prompt: str, *, params: SamplingParams | None = None
    ) -> GenerationOutput: ...

    def score(self, agent: str, prompt: Sequence[int], output_ids: Sequence[int]) -> Any: ...


class EngineClient:
    """Runs turns on an engine in this process."""

    def __init__(self, engine: EngineLike) -> None:
        self._engine = engine

    def begin_episode(self) -> None:
        """Drop the engine's cache, so that a result does not depend on what ran before."""
        self._engine.reset()

    def complete(self, request: TurnRequest) -> TurnOutput:
        """Let an agent write."""
        params = SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            seed=request.seed,
            stop=request.stop,
        )
        try:
            output = self._engine.generate(request.agent, request.prompt, params=params)
        except InvalidRequestError as error:
            raise TurnRefusedError(str(error)) from error
        return TurnOutput(
            output.text,
            output.finish_reason,
            output.timings,
            output.usage,
            output.prompt_token_ids,
            output.token_ids,
        )

    def force(self, request: TurnRequest, text: str) -> ForcedOutput:
        """Score `text` token by token. It may begin inside the prompt's last token."""
        prompt_ids, text_ids = self._split_ids(request.prompt, text)
        started = time.perf_counter()
        try:
            logits = self._engine.score(request.agent, prompt_ids, text_ids)
        except InvalidRequestError as error:
            raise TurnRefusedError(str(error)) from error
        seconds = time.perf_counter() - started
        logprobs = logits.log_softmax(-1)
        nll = -sum(float(row[token]) for row, token in zip(logprobs, text_ids, strict=True))
        best = logits.argmax(-1).tolist()
        top1 = sum(ours == token for ours, token in zip(best, text_ids, strict=True))
        return ForcedOutput(top1 == len(text_ids), seconds, len(text_ids), nll, top1)

    def _split_ids(self, prompt: str, text: str) -> tuple[list[int], list[int]]:
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise TurnRefusedError("the engine's model has no tokenizer: text cannot be forced")
        before, whole = tokenizer.encode_prompt(prompt), tokenizer.encode_prompt(prompt + text)
        pairs = enumerate(zip(before, whole, strict=False))
        shared = next((i for i, (a, b) in pairs if a != b), min(len(before), len(whole)))
        return whole[:shared], whole[shared:]
