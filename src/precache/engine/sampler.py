"""Logits to one token. Owns the order of penalties and filters, and the random numbers of one turn.

The order is vLLM's: mask, repetition, frequency and presence penalty, temperature, min_p, top_k, top_p.
Does not own: which logits are finite (the engine checks), when a turn ends.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from precache.request import SamplingParams, TokenLogprob

LogitsMask: TypeAlias = Callable[[Sequence[int], Tensor], Tensor]

_GREEDY_BELOW = 1e-5  # temperatures under this are greedy; dividing by them only loses precision


class Sampler:
    """Chooses the tokens of one turn. The same seed and logits give the same tokens.

    ``logits_mask`` is called with the output so far and the logits [vocab], and returns logits with -inf for what a
    grammar forbids; it leaves at least one token.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        *,
        logits_mask: LogitsMask | None = None,
    ) -> None:
        self.params = params
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.output_token_ids: list[int] = []
        self._prompt_token_ids = prompt_token_ids
        self._logits_mask = logits_mask
        self._generator: torch.Generator | None = None
        self._counts: Tensor | None = None  # [vocab], times each token was sampled
        self._seen: Tensor | None = None  # [vocab], whether it is in prompt or output

    def sample(self, logits: Tensor) -> int:
        """Return the next token for fp32 logits [vocab], which stay as they are."""
        if self._logits_mask is not None:
            logits = self._logits_mask(self.output_token_ids, logits)
        logits = self._penalised(logits)
        greedy = self.params.temperature < _GREEDY_BELOW
        token_id = int(logits.argmax()) if greedy else self._draw(logits)
        self._remember(token_id)
        return token_id

    def logprobs(self, logits: Tensor, token_id: int, n: int) -> TokenLogprob:
        """Return the model's own log-probability of a token, and of the ``n`` most likely ones."""
        values = torch.log_softmax(logits, dim=-1)
        best = values.topk(min(n, values.shape[-1]))
        top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return TokenLogprob(token_id, float(values[token_id]), top)

    def _draw(self, logits: Tensor) -> int:
        values, token_ids = _filtered(logits, self.params)
        if self._generator is None:
            self._generator = torch.Generator(logits.device).manual_seed(self.seed)
        drawn = torch.multinomial(values.softmax(-1), 1, generator=self._generator)
        return int(drawn if token_ids is None else token_ids[drawn])

    def _penalised(self, logits: Tensor) -> Tensor:
        params = self.params
        if params.repetition_penalty != 1.0:
            scaled = torch.where(
                logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty
            )
            logits = torch.where(self._seen_mask(logits), scaled, logits)
        if params.frequency_penalty or params.presence_penalty:
            counts = self._output_counts(logits)
            logits = logits - params.frequency_penalty * counts
            logits = logits - params.presence_penalty * (counts > 0)
        return logits

    def _seen_mask(self, logits: Tensor) -> Tensor:
        if self._seen is None:
            self._seen = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
            seen = [*self._prompt_token_ids, *self.output_token_ids]
            self._seen[torch.tensor(seen, dtype=torch.long, device=logits.device)] = True
        return self._seen

    def _output_counts(self, logits: Tensor) -> Tensor:
        if self._counts is None:
            sampled = torch.tensor(self.output_token_ids, dtype=torch.long, device=logits.device)
            self._counts = torch.bincount(sampled, minlength=logits.shape[-1]).to(logits.dtype)
        return self._counts

    def _remember(self, token_id: int) -> None:
        self.output_token_ids.append(token_id)
        if self._counts is not None:
            self._counts[token_id] += 1
        if self._seen is not None:
            self._seen[token_id] = True


def _filtered(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor | None]:
    """Scaled logits that are left to draw from, and their token ids (None: all, in order)."""
    values = (
        logits - logits.max()
    ) / params.temperature  # the maximum first, so that nothing overflows
    if params.min_p > 0:
        values = values.masked_fill(values < math.log(params.min_p), -math.inf)
    if params.top_k == 0 and params.top_p == 1.0:
        return values, None
    vocab_size = values.shape[-1]
    num_kept = min(params.top_k, vocab_size) if params.top_k else vocab_size
    values, token_ids = values.topk(num_kept)
    if params.top_p < 1.0:
        probs = values.softmax(-1)
        before = probs.cumsum(-1) - probs  # a token stays while those above it hold less than top_p
        before[0] = 0.0
        values = values.masked_fill(before >= params.top_p, -math.inf)
    return values, token_ids
