"""Held-out loss per role: how well the model, with its active adapter, writes a role's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from precache.training.encoding import Encoded
from precache.training.loss import score_tokens


@dataclass(frozen=True, slots=True)
class RoleScore:
    """Mean over the role's `tokens` supervised tokens: NLL in nats, and the top-1 hit rate."""

    nll: float
    top1: float
    tokens: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.inference_mode()
def evaluate(
    model: PreTrainedModel, examples: Sequence[Encoded], roles: Sequence[str]
) -> dict[str, RoleScore]:
    """Score every role's tokens in `examples` by one forward per example (all roles share it)."""
    nll = dict.fromkeys(roles, 0.0)
    hits = dict.fromkeys(roles, 0)
    count = dict.fromkeys(roles, 0)
    for example in examples:
        present = [role for role in roles if role in example.targets]
        positions = [p for role in present for p in example.targets[role]]
        scores = score_tokens(model, example.input_ids, positions)
        start = 0
        for role in present:
            rows = slice(start, start + len(example.targets[role]))
            nll[role] += float(scores.nll[rows].sum())
            hits[role] += int(scores.is_top1[rows].sum())
            count[role] += len(example.targets[role])
            start = rows.stop
    return {
        role: RoleScore(nll[role] / count[role], hits[role] / count[role], count[role])
        for role in roles
    }
