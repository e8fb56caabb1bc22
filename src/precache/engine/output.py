"""The output side of one turn: sampled tokens become text, and something ends it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from precache.chat import ChatTokenizer, IncrementalDecoder, StopMatcher
from precache.engine.sampler import LogitsMask, Sampler
from precache.engine.turns import Turn
from precache.request import (
    FinishReason,
    GenerationChunk,
    GenerationOutput,
    SamplingParams,
    Timings,
    TokenLogprob,
    Usage,
)


class OutputStream:
    """Samples the tokens of a turn, turns them into text and knows when and why it ended.

    Text that may still become a stop string, and bytes of a character that is not complete, are held back. Without a
    tokenizer the text stays empty.
    """

    def __init__(
        self,
        agent: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        max_tokens: int,
        tokenizer: ChatTokenizer | None,
        eos_token_ids: tuple[int, ...],
        logits_mask: LogitsMask | None = None,
    ) -> None:
        self.finish_reason: FinishReason | None = None
        self.ttft_s = 0.0
        self._agent = agent
        self._prompt_ids = tuple(prompt_ids)
        self._params = params
        self._max_tokens = max_tokens
        self._sampler = Sampler(params, prompt_ids, logits_mask=logits_mask)
        self._decoder = None if tokenizer is None else IncrementalDecoder(tokenizer)
        self._stops = StopMatcher(params.stop)
        self._ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._text = ""
        self._piece = ""

    def sample(self, logits: Tensor) -> int:
        """Choose the next token from logits [vocab], and take note of what it means for the turn."""
        token_id = self._sampler.sample(logits)
        self._token_ids.append(token_id)
        if self._params.logprobs is not None:
            self._logprobs.append(self._sampler.logprobs(logits, token_id, self._params.logprobs))
        self._take(token_id)
        self._text += self._piece
        return token_id

    def _take(self, token_id: int) -> None:
        ended = token_id in self._ends
        self._piece, stopped = ("", False) if ended else self._push(token_id)
        if stopped:
            self.finish_reason = "stop"
        elif ended or len(self._token_ids) >= self._max_tokens:
            rest, stopped = self._flush()
            self._piece += rest
            self.finish_reason = "stop" if ended or stopped else "length"

    def _push(self, token_id: int) -> tuple[str, bool]:
        if self._decoder is None:
            return "", False
        return self._stops.push(self._decoder.push(token_id))

    def _flush(self) -> tuple[str, bool]:
        if self._decoder is None:
            return "", False
        piece, stopped = self._stops.push(self._decoder.flush())
        return (piece, True) if stopped else (piece + self._stops.flush(), False)

    def chunk(self) -> GenerationChunk:
        """What the last token added."""
        return GenerationChunk(self._piece, (self._token_ids[-1],), tuple(self._logprobs[-1:]))

    def last_chunk(self, turn: Turn, total_s: float) -> GenerationChunk:
        """What the last token added, with the whole output."""
        assert self.finish_reason is not None
        output = GenerationOutput(
            adapter_name=self._agent,
            session_id=turn.trajectory.session_id,
            prompt_token_ids=self._prompt_ids,
            token_ids=tuple(self._token_ids),
            text=self._text,
            finish_reason=self.finish_reason,
            usage=Usage(
                prompt_tokens=len(self._prompt_ids),
                completion_tokens=len(self._token_ids),
                cached_tokens=turn.matched,
                catch_up_tokens=turn.catch_up_tokens,
                neutral_tokens=turn.neutral_tokens,
                shared_tokens=turn.shared_tokens,
                refreshed_kv_entries=turn.catch_up.kv_entries,
                recomputed_token_layers=turn.catch_up.token_layers,
                catch_up_flops=turn.catch_up.flops,
                flops=turn.work.flops,
            ),
            timings=Timings(self.ttft_s, total_s, turn.neutral_wait_s, turn.neutral_s),
            logprobs=tuple(self._logprobs),
        )
        chunk = self.chunk()
        return GenerationChunk(chunk.text, chunk.token_ids, chunk.logprobs, output)
