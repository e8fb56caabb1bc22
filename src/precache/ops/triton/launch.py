"""Turns one attention call into kernel launches. Owns the scratch memory of split passes."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from precache.ops.contract import AttentionOutput, KeyStrip
from precache.ops.triton.kernels import attend_kernel, merge_kernel
from precache.ops.triton.tiles import Tiles, splits_for, tiles_for

_SMALLEST = 16  # of a dimension of a product


@dataclass(frozen=True, slots=True)
class Pages:
    """Where the sequences of a batch lie."""

    block_table: Tensor  # [num_seqs, max_pages] int32
    query_start: Tensor  # [num_seqs + 1] int32
    kv_lens: Tensor  # [num_seqs] int32
    adapters: Tensor | None  # [num_seqs] int32, below 0 for the base model


@dataclass(frozen=True, slots=True)
class Call:
    """One attention call in the kernels' terms. Everything is [page, row, ...]; one buffer is page 0."""

    q: Tensor  # [num_tokens, num_heads, head_dim]
    k: Tensor  # [num_pages, page_size, num_kv_heads, head_dim]
    v_base: Tensor  # as k
    z: Tensor | None  # [num_pages, page_size, num_adapters, rank]
    b: Tensor | None  # [num_adapters, num_kv_heads, rank, head_dim]
    scale: float
    max_q_len: int
    max_kv_len: int
    first_position: int | Tensor = 0  # of the queries, relative to the first key; unused with pages
    window: int | None = None
    softcap: float | None = None
    k_lora: KeyStrip | None = None
    pages: Pages | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel's grid and its arguments by name."""

    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    options: dict[str, Any]


def run(call: Call, tiles: Tiles | None, out: Tensor) -> AttentionOutput:
    """Fill `out` [num_tokens, num_heads, head_dim]; return it with its log-sum-exp, heads first."""
    tiles = tiles or default_tiles(call)
    num_tokens, num_heads, _ = out.shape
    lse = out.new_empty(num_heads, num_tokens, dtype=torch.float32)
    attend, merge = plan(call, tiles, out, lse)
    with _current_device(out.device):
        attend_kernel[attend.grid](**attend.arguments, **attend.options)
        if merge is not None:
            merge_kernel[merge.grid](**merge.arguments, **merge.options)
    return AttentionOutput(out.transpose(0, 1), lse)


def default_tiles(call: Call) -> Tiles:
    """The tiles that `run` takes by itself."""
    rows = call.max_q_len * call.q.shape[1] // call.k.shape[2]
    rank = 0 if call.z is None else call.z.shape[3]
    width = _padded(call.q.shape[2]) + _padded(rank)
    return tiles_for(rows, width, call.q.dtype, call.k_lora is not None)


def plan(call: Call, tiles: Tiles, out: Tensor, lse: Tensor) -> tuple[Launch, Launch | None]:
    """The launches of a call: one, or two if its keys are split. Allocates the scratch memory."""
    num_kv_heads = call.k.shape[2]
    num_seqs = 1 if call.pages is None else call.pages.kv_lens.shape[0]
    group = call.q.shape[1] // num_kv_heads
    blocks = triton.cdiv(call.max_q_len * group, tiles.block_m)
    splits = tiles.num_splits
    if splits is None:
        seen = min(call.max_kv_len, call.window or call.max_kv_len)
        splits = splits_for(blocks * num_kv_heads * num_seqs, seen, call.q.device)
    shared = _shared(call, tiles, splits) | _output(out, lse) | _scratch(call, splits)
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    attend = Launch(
        (blocks, num_kv_heads, num_seqs * splits),
        shared | _inputs(call) | _masking(call) | {"BLOCK_N": tiles.block_n},
        options,
    )
    if splits == 1:
        return attend, None
    return attend, Launch(
        (blocks, num_kv_heads, num_seqs), shared | {"PAGED": call.pages is not None}, options
    )


def _shared(call: Call, tiles: Tiles, splits: int) -> dict[str, Any]:
    """What both kernels take."""
    head_dim = call.q.shape[2]
    rank = 0 if call.z is None else call.z.shape[3]
    # Triton's interpreter has no bfloat16 products; see `steps`.
    widen = call.q.device.type == "cpu" and call.q.dtype == torch.bfloat16
    b, pages = call.b, call.pages
    return {
        "b_ptr": b,
        "b_adapter": 0 if b is None else b.stride(0),
        "b_head": 0 if b is None else b.stride(1),
        "b_rank": 0 if b is None else b.stride(2),
        "query_start_ptr": None if pages is None else pages.query_start,
        "adapters_ptr": None if pages is None else pages.adapters,
        "q_len": call.max_q_len,
        "num_tokens": call.q.shape[0],
        "GROUP": call.q.shape[1] // call.k.shape[2],
        "HEAD_DIM": head_dim,
        "HEAD_PAD": _padded(head_dim),
        "RANK": rank,
        "RANK_PAD": _padded(rank),
        "NUM_SPLITS": splits,
        "BLOCK_M": tiles.block_m,
        "PRECISION": "ieee" if call.q.dtype == torch.float32 else "tf32",
        "WIDEN": widen,
    }


def _output(out: Tensor, lse: Tensor) -> dict[str, Any]:
    return {
        "out_ptr": out,
        "lse_ptr": lse,
        "out_row": out.stride(0),
        "out_head": out.stride(1),
    }


def _scratch(call: Call, splits: int) -> dict[str, Any]:
    """Both accumulators, the maximum and the sum of every split, for every token and head."""
    names = ("part_ptr", "part_z_ptr", "part_max_ptr", "part_sum_ptr")
    if splits == 1:
        return dict.fromkeys(names)
    num_tokens, num_heads, head_dim = call.q.shape
    rank = 0 if call.z is None else call.z.shape[3]
    sizes = [splits * num_tokens * num_heads * width for width in (head_dim, rank, 1, 1)]
    memory = torch.empty(sum(sizes), dtype=torch.float32, device=call.q.device)
    ends = list(itertools.accumulate(sizes))
    parts = [memory[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    return dict(zip(names, parts, strict=True))


def _inputs(call: Call) -> dict[str, Any]:
    z, pages = call.z, call.pages
    scattered = isinstance(call.first_position, Tensor)
    return {
        "q_ptr": call.q,
        "q_row": call.q.stride(0),
        "q_head": call.q.stride(1),
        "k_ptr": call.k,
        "k_page": call.k.stride(0),
        "k_row": call.k.stride(1),
        "k_head": call.k.stride(2),
        "v_ptr": call.v_base,
        "v_page": call.v_base.stride(0),
        "v_row": call.v_base.stride(1),
        "v_head": call.v_base.stride(2),
        "z_ptr": z,
        "z_page": 0 if z is None else z.stride(0),
        "z_row": 0 if z is None else z.stride(1),
        "z_adapter": 0 if z is None else z.stride(2),
        "kv_lens_ptr": None if pages is None else pages.kv_lens,
        "table_ptr": None if pages is None else pages.block_table,
        "table_row": 0 if pages is None else pages.block_table.stride(0),
        "kv_len": call.max_kv_len,
        "positions_ptr": call.first_position if scattered else None,
        "first_position": 0 if scattered else call.first_position,
        "SCATTERED": scattered,
        "PAGE": 0 if pages is None else call.k.shape[1],
        **_key_strip(call.k_lora),
    }


def _key_strip(strip: KeyStrip | None) -> dict[str, Any]:
    rank = 0 if strip is None else strip.z.shape[1]
    return {
        "kz_ptr": None if strip is None else strip.z,
        "kz_row": 0 if strip is None else strip.z.stride(0),
        "kb_ptr": None if strip is None else strip.b,
        "kb_head": 0 if strip is None else strip.b.stride(0),
        "kb_rank": 0 if strip is None else strip.b.stride(1),
        "cos_ptr": None if strip is None else strip.cos,
        "cos_row": 0 if strip is None else strip.cos.stride(0),
        "sin_ptr": None if strip is None else strip.sin,
        "sin_row": 0 if strip is None else strip.sin.stride(0),
        "KEY_RANK": rank,
        "KEY_RANK_PAD": _padded(rank),
    }


def _masking(call: Call) -> dict[str, Any]:
    return {
        "scale": call.scale,
        "softcap": 1.0 if call.softcap is None else call.softcap,
        "SOFTCAP": call.softcap is not None,
        "WINDOW": call.window if _window_hides_keys(call) else 0,
    }


def _window_hides_keys(call: Call) -> bool:
    """Whether some query may lie too far behind some key; a window that hides none costs the masks of all keys."""
    if call.window is None or isinstance(call.first_position, Tensor):
        return call.window is not None
    last = call.first_position + call.max_q_len - 1 if call.pages is None else call.max_kv_len - 1
    return call.window <= last


def _padded(size: int) -> int:
    return max(int(triton.next_power_of_2(size)), _SMALLEST)


def _current_device(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, whatever its arguments live on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
