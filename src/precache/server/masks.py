"""What restricts the tokens of a turn: ``logit_bias`` and grammars, as one function of the logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from precache.engine.sampler import LogitsMask


def mask_factory(
    bias: Mapping[int, float], grammar: Callable[[], LogitsMask] | None = None
) -> Callable[[], LogitsMask] | None:
    """A maker of masks, one for each choice; None if nothing is restricted. The grammar has the last word."""
    if not bias:
        return grammar

    def make() -> LogitsMask:
        inner = None if grammar is None else grammar()

        def mask(output_ids: Sequence[int], logits: Tensor) -> Tensor:
            logits = _biased(logits, bias)
            return logits if inner is None else inner(output_ids, logits)

        return mask

    return make


def _biased(logits: Tensor, bias: Mapping[int, float]) -> Tensor:
    token_ids = torch.tensor(list(bias), device=logits.device)
    values = torch.tensor(list(bias.values()), dtype=logits.dtype, device=logits.device)
    return logits.index_add(0, token_ids, values)
