"""Attention over a shared KV cache with an adapter's low-rank part: facade and backend registry.

P = softmax(mask(softcap(q k^T * scale)));  out = P v_base + (P z) b
"""

from __future__ import annotations

from torch import Tensor

from precache.ops.backends import AUTO, available_backends, choose_backend, load_backend
from precache.ops.contract import (
    AttentionContractError,
    AttentionInputs,
    AttentionOutput,
    BackendUnavailableError,
    KeyStrip,
    UnknownBackendError,
    ValueStrip,
    check,
)
from precache.ops.mass import attention_mass
from precache.ops.merge import merge_attention

__all__ = [
    "AUTO",
    "AttentionContractError",
    "AttentionOutput",
    "BackendUnavailableError",
    "KeyStrip",
    "UnknownBackendError",
    "ValueStrip",
    "attention_mass",
    "available_backends",
    "choose_backend",
    "lora_attention",
    "merge_attention",
]


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
    return load_backend(backend, q.device, q.dtype)(inputs)
