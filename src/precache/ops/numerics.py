"""Which dtype each step of the CPU backend runs in, and the steps that its two forms share."""

from __future__ import annotations

import torch
from torch import Tensor

_NARROW, _MANY_ROWS = 16, 32


def accumulator_dtype(q: Tensor) -> torch.dtype:
    """Scores and sums are kept in float32, or in float64 for float64 inputs."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def product_dtype(q: Tensor) -> torch.dtype:
    """The dtype of q, unless this CPU only emulates its products (measured: 100 times slower)."""
    features = _NATIVE_PRODUCTS.get(q.dtype)
    if q.device.type != "cpu" or features is None:
        return q.dtype
    capabilities = torch.cpu.get_capabilities()
    native = any(capabilities.get(feature) for feature in features)
    return q.dtype if native else torch.float32


_NATIVE_PRODUCTS = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16", "fp16_arith"),
}


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor.to(dtype)`, which takes microseconds even where it has nothing to do."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def cap_scores(scores: Tensor, softcap: float | None) -> Tensor:
    """In place, softcap * tanh(scores / softcap)."""
    return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)


def weigh(probs: Tensor, values: Tensor) -> Tensor:
    """probs [num_kv_heads, rows, n] times values [num_kv_heads, n, d] or, shared, [n, d]."""
    product = cast(probs, values.dtype)
    num_kv_heads, rows, n = product.shape
    width = values.shape[-1]
    if values.dim() == 2 and width < _NARROW and num_kv_heads * rows >= _MANY_ROWS:
        # The BLAS of an AVX2 machine takes a third of the time for it this way round.
        turned = torch.mm(values.t(), product.view(-1, n).t()).t()
        return cast(turned.reshape(num_kv_heads, rows, width), probs.dtype)
    return cast(torch.matmul(product, values), probs.dtype)
