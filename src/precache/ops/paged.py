"""Attention of a batch of sequences over a paged cache: facade, contract and checks.

Pages, block tables and lengths are vLLM's: sequence s holds the queries `query_start[s]` up to
`query_start[s + 1]`, which are the last ones of its `kv_lens[s]` tokens, and token t of it lies in
row t % page_size of page `block_table[s, t // page_size]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from precache.ops.backends import choose_backend
from precache.ops.contract import (
    AttentionContractError,
    AttentionOutput,
    UnknownBackendError,
    check_settings,
)

_BACKENDS = {"triton": "precache.ops.triton", "native": "precache.ops.native"}


@dataclass(frozen=True, slots=True)
class PagedStrips:
    """The low-rank values of every adapter, and which adapter each sequence reads."""

    z: Tensor  # [num_pages, page_size, num_adapters, rank], unscaled; a view of the pages' tail
    b: Tensor  # [num_adapters, num_kv_heads, rank, head_dim], scaling folded in, 0 past a smaller rank
    adapter_index: Tensor  # [num_seqs] int32; below 0: the base model, which reads v_base alone


class PagedInputs(NamedTuple):
    """One batch. q, k, v_base and z are contiguous in the last dimension; their other strides are free.

    The native kernel also takes keys that lie column by column in their page: stride 1 in page_size.
    """

    q: Tensor  # [num_tokens, num_heads, head_dim], after RoPE, the sequences one after the other
    k: Tensor  # [num_pages, page_size, num_kv_heads, head_dim], after RoPE
    v_base: Tensor  # as k
    block_table: Tensor  # [num_seqs, max_pages] int32
    query_start: Tensor  # [num_seqs + 1] int32, ascending from 0
    kv_lens: Tensor  # [num_seqs] int32, the queries included
    max_q_len: int  # bounds known to the host: nothing on the device is waited for
    max_kv_len: int
    scale: float
    strips: PagedStrips | None = None
    window: int | None = None
    softcap: float | None = None


def paged_lora_attention(
    inputs: PagedInputs, out: Tensor | None = None, *, backend: str = "triton"
) -> AttentionOutput:
    """Causal attention of every sequence, with `v_base + z b` of its adapter as values.

    `out` [num_tokens, num_heads, head_dim] is filled if it is given. The output is a view of it,
    heads first, as from `lora_attention`. `backend` is "triton" or, on a CPU and for one query a
    sequence, "native". Raises UnknownBackendError, and BackendUnavailableError where it cannot run.
    """
    if backend not in _BACKENDS:
        raise UnknownBackendError(backend, known=_BACKENDS)
    check_paged(inputs, keys_by_column=backend == "native")
    if out is None:
        out = torch.empty_like(inputs.q, memory_format=torch.contiguous_format)
    else:
        _check_tensor("out", out, inputs.q.shape, inputs.q)
    choose_backend(backend, inputs.q.device, inputs.q.dtype)
    attended: AttentionOutput = import_module(_BACKENDS[backend]).attend_paged(inputs, out)
    return attended


def check_paged(inputs: PagedInputs, keys_by_column: bool = False) -> None:
    """Refuse a batch whose shapes, dtypes or strides do not fit together; looks at metadata only."""
    q, k = inputs.q, inputs.k
    if q.dim() != 3 or q.numel() == 0 or not q.is_floating_point():
        raise AttentionContractError(
            "q", f"{q.dtype} {list(q.shape)}", "floating [num_tokens, num_heads, head_dim]"
        )
    if k.dim() != 4 or k.numel() == 0 or k.shape[3] != q.shape[2]:
        raise AttentionContractError(
            "k.shape", list(k.shape), f"[num_pages, page_size, num_kv_heads, {q.shape[2]}]"
        )
    if q.shape[1] % k.shape[2]:
        raise AttentionContractError(
            "num_heads", q.shape[1], f"a multiple of num_kv_heads={k.shape[2]}"
        )
    _check_tensor("q", q, q.shape, q)
    by_column = keys_by_column and k.stride(3) != 1
    _check_tensor("k", k, k.shape, q, dense=1 if by_column else -1)
    _check_tensor("v_base", inputs.v_base, k.shape, q)
    num_seqs = inputs.kv_lens.shape[0]
    _check_index("kv_lens", inputs.kv_lens, (num_seqs,), q)
    _check_index("query_start", inputs.query_start, (num_seqs + 1,), q)
    _check_index("block_table", inputs.block_table, (num_seqs, inputs.block_table.shape[-1]), q)
    for what, got in (("max_q_len", inputs.max_q_len), ("max_kv_len", inputs.max_kv_len)):
        if got < 1:
            raise AttentionContractError(what, got, "1 or more")
    if inputs.strips is not None:
        _check_strips(inputs.strips, inputs)
    check_settings(inputs.scale, inputs.window, inputs.softcap)


def _check_strips(strips: PagedStrips, inputs: PagedInputs) -> None:
    pages, page_size, num_kv_heads, head_dim = inputs.k.shape
    if strips.z.dim() != 4 or strips.z.numel() == 0:
        raise AttentionContractError(
            "strips.z.shape",
            list(strips.z.shape),
            f"[{pages}, {page_size}, num_adapters, rank], none of them 0",
        )
    num_adapters, rank = strips.z.shape[2:]
    _check_tensor("strips.z", strips.z, (pages, page_size, num_adapters, rank), inputs.q)
    _check_tensor("strips.b", strips.b, (num_adapters, num_kv_heads, rank, head_dim), inputs.q)
    _check_index("strips.adapter_index", strips.adapter_index, inputs.kv_lens.shape, inputs.q)


def _check_tensor(
    what: str, tensor: Tensor, shape: tuple[int, ...], q: Tensor, dense: int = -1
) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise AttentionContractError(f"{what}.shape", list(tensor.shape), f"{list(shape)}")
    if tensor.dtype != q.dtype:
        raise AttentionContractError(f"{what}.dtype", tensor.dtype, f"the dtype of q, {q.dtype}")
    _check_device(what, tensor, q)
    if tensor.stride(dense) != 1 and tensor.shape[dense] != 1:
        raise AttentionContractError(f"{what}.stride({dense})", tensor.stride(dense), "1")


def _check_index(what: str, tensor: Tensor, shape: tuple[int, ...], q: Tensor) -> None:
    if tensor.dtype != torch.int32 or tuple(tensor.shape) != tuple(shape):
        raise AttentionContractError(
            what, f"{tensor.dtype} {list(tensor.shape)}", f"torch.int32 {list(shape)}"
        )
    _check_device(what, tensor, q)
    if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        raise AttentionContractError(f"{what}.stride(-1)", tensor.stride(-1), "1")


def _check_device(what: str, tensor: Tensor, q: Tensor) -> None:
    if tensor.device != q.device:
        raise AttentionContractError(
            f"{what}.device", tensor.device, f"the device of q, {q.device}"
        )
