"""Loss on chosen tokens of one sequence; the vocabulary projection runs on those rows only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from precache.errors import UnsupportedModelError

_LOGIT_CHANGES = ("final_logit_softcapping", "logits_scaling", "logit_scale")


class TokenScores(NamedTuple):
    """Scores of the supervised tokens of one sequence, both [num_targets], float32 and bool."""

    nll: Tensor
    is_top1: Tensor


def check_head(model: PreTrainedModel) -> None:
    """Refuse models that change the logits after the output projection: we would miss it."""
    for name in _LOGIT_CHANGES:
        value = getattr(model.config, name, None)
        if value not in (None, 1, 1.0):
            raise UnsupportedModelError(
                f"model config has {name}={value}; training supports models whose logits are the "
                "output projection of the last hidden state"
            )


def score_tokens(
    model: PreTrainedModel, input_ids: Sequence[int], positions: Sequence[int]
) -> TokenScores:
    """Run the model once over `input_ids` and score the tokens at `positions` (none of them 0)."""
    ids = torch.tensor([list(input_ids)], device=model.device)  # [1, seq_len]
    decoder: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state  # [1, seq_len, hidden]
    index = torch.tensor(list(positions), device=model.device)
    head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    logits = head(hidden[0, index - 1]).float()  # [num_targets, vocab]
    labels = ids[0, index]
    nll = nn.functional.cross_entropy(logits, labels, reduction="none")
    return TokenScores(nll, logits.argmax(-1) == labels)
