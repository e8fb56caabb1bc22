"""Attention over a shared KV cache with an adapter's low-rank part: facade and backend registry.

P = softmax(mask(softcap(q k^T * scale)));  out = P v_base + (P z) b
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from importlib import import_module

from torch import Tensor

from precache.ops.contract import (
    AttentionContractError,
    AttentionInputs,
    AttentionOutput,
    KeyStrip,
    UnknownBackendError,
    ValueStrip,
    check,
)
from precache.ops.merge import merge_attention

__all__ = [
    "AttentionContractError",
    "AttentionOutput",
    "KeyStrip",
    "UnknownBackendError",
    "ValueStrip",
    "available_backends",
    "lora_attention",
    "merge_attention",
]

_BACKENDS = {"reference": "precache.ops.reference", "cpu": "precache.ops.cpu"}
_AUTO = "cpu"  # blocked torch; also the portable choice on CUDA and MPS

_logger = logging.getLogger(__name__)


def lora_attention(
    q: Tensor,  # [num_heads, q_len, head_dim], after RoPE
    k: Tensor,  # [num_kv_heads, kv_len, head_dim], after RoPE; may be a view [:, :kv_len]
    v_base: Tensor,  # [num_kv_heads, kv_len, head_dim]; may be a view [:, :kv_len]
    *,
    scale: float,
    q_positions: int | Tensor,
    kv_start: int = 0,
    v_lora: ValueStrip | None = None,
    k_lora: KeyStrip | None = None,
    window: int | None = None,
    softcap: float | None = None,
    backend: str = "auto",
) -> AttentionOutput:
    """Attend causally with `v_base + z b` as values, without ever materialising them.

    `q_positions` is the position of the first of contiguous queries, or an ascending int64 tensor
    [q_len] of scattered ones; keep that tensor on the CPU, elsewhere reading it waits for the
    device. Key i sits at position `kv_start + i`; a query at p sees a key at t if t <= p and, with
    a `window`, p - t < window. Query head h uses KV head h // (num_heads // num_kv_heads).
    Inference only: no gradient flows through.
    """
    inputs = AttentionInputs(
        q, k, v_base, scale, q_positions, kv_start, v_lora, k_lora, window, softcap
    )
    check(inputs)
    return _load_backend(backend)(inputs)


def available_backends() -> tuple[str, ...]:
    """Names that `lora_attention` takes as `backend`, besides "auto"."""
    return tuple(_BACKENDS)


@functools.cache
def _load_backend(name: str) -> Callable[[AttentionInputs], AttentionOutput]:
    if name == "auto":
        _logger.info("attention backend %r, the only one for every device, chosen by auto", _AUTO)
        return _load_backend(_AUTO)
    if name not in _BACKENDS:
        raise UnknownBackendError(name, known=["auto", *_BACKENDS])
    attend: Callable[[AttentionInputs], AttentionOutput] = import_module(_BACKENDS[name]).attend
    return attend
