"""Two sets of logits on the same text -> how far they are apart. Sums, so that they add up over turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Score:
    """Of one role's tokens: ``kl`` and ``nll`` are sums in nats, ``agreed`` counts equal most likely tokens."""

    tokens: int = 0
    kl: float = 0.0
    agreed: int = 0
    nll: float = 0.0
    max_dlogit: float = 0.0

    def __add__(self, other: Score) -> Score:
        return Score(
            self.tokens + other.tokens,
            self.kl + other.kl,
            self.agreed + other.agreed,
            self.nll + other.nll,
            max(self.max_dlogit, other.max_dlogit),
        )


def score(exact: Tensor, ours: Tensor, said: Sequence[int]) -> Score:
    """Compare logits [len(said), vocab]: KL(exact || ours), agreement, the NLL of ``said`` under ours, max |dlogit|."""
    largest = float((exact - ours).abs().max())
    agreed = int((exact.argmax(-1) == ours.argmax(-1)).sum())
    # Double: the KL of equal logits would otherwise be rounding, and of either sign.
    log_p, log_q = exact.double().log_softmax(-1), ours.double().log_softmax(-1)
    kl = float((log_p.exp() * (log_p - log_q)).sum())
    targets = torch.tensor(said, device=ours.device).unsqueeze(1)
    nll = -float(log_q.gather(1, targets).sum())
    return Score(len(said), kl, agreed, nll, largest)
