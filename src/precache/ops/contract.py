"""What every attention backend takes, gives and may rely on. Owns the checks; computes nothing.

A backend is a function `attend(inputs: AttentionInputs) -> AttentionOutput`. It may assume that
`check` has passed. The checks never wait for an accelerator and look at metadata only, because
they run once per layer of every decoded token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from precache.errors import PrecacheError


class AttentionContractError(PrecacheError):
    """The arguments of an attention call do not fit together; nothing was computed."""

    def __init__(self, what: str, got: object, allowed: str) -> None:
        self.what = what
        self.got = got
        self.allowed = allowed
        super().__init__(f"{what}: got {got}, allowed is {allowed}")


class UnknownBackendError(PrecacheError):
    """No attention backend of that name."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        self.known = list(known)
        super().__init__(f"unknown attention backend: got {name!r}, allowed are {self.known}")


class BackendUnavailableError(PrecacheError):
    """An attention backend that was asked for cannot run here."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self.reason = reason
        super().__init__(f"attention backend {name!r} cannot be used: {reason}")


@dataclass(frozen=True, slots=True)
class ValueStrip:
    """An adapter's low-rank values: `z @ b` is what it adds to `v_base`."""

    z: Tensor  # [kv_len, rank], hidden @ A, unscaled; stride(0) may exceed rank
    b: Tensor  # [num_kv_heads, rank, head_dim], scaling folded in


@dataclass(frozen=True, slots=True)
class KeyStrip:
    """An adapter's low-rank keys: `z @ b`, rotated, is what it adds to `k`."""

    z: Tensor  # [kv_len, rank], hidden @ A, unscaled; stride(0) may exceed rank
    b: Tensor  # [num_kv_heads, rank, head_dim], scaling folded in
    cos: Tensor  # [kv_len, head_dim], rotary tables at the keys' positions, rotate-half convention
    sin: Tensor  # [kv_len, head_dim]


class AttentionOutput(NamedTuple):
    """Attention over one segment of keys, with what is needed to merge it with other segments."""

    out: Tensor  # [num_heads, q_len, head_dim], dtype of q; 0 for a row that sees no key
    lse: Tensor  # [num_heads, q_len], float32 (float64 for float64 inputs); -inf for such a row


class AttentionInputs(NamedTuple):
    """One attention call. `precache.ops.lora_attention` documents the fields."""

    q: Tensor  # [num_heads, q_len, head_dim]
    k: Tensor  # [num_kv_heads, kv_len, head_dim]
    v_base: Tensor  # [num_kv_heads, kv_len, head_dim]
    scale: float
    q_positions: int | Tensor
    kv_start: int
    v_lora: ValueStrip | None
    k_lora: KeyStrip | None
    window: int | None
    softcap: float | None


def check(inputs: AttentionInputs) -> None:
    """Refuse a call that breaks the contract."""
    q = inputs.q
    _check_attended(q, inputs.k, inputs.v_base)
    _check_positions(q, inputs.q_positions, inputs.kv_start)
    if inputs.v_lora is not None:
        _check_strip("v_lora", inputs.v_lora, inputs)
    if inputs.k_lora is not None:
        _check_strip("k_lora", inputs.k_lora, inputs)
        _check_rotary(inputs.k_lora, inputs)
    check_settings(inputs.scale, inputs.window, inputs.softcap)
    if torch.is_grad_enabled() and (q.requires_grad or inputs.k.requires_grad):
        raise AttentionContractError(
            "autograd", "q or k that requires grad", "inference, under torch.inference_mode()"
        )


def _check_attended(q: Tensor, k: Tensor, v_base: Tensor) -> None:
    if q.dim() != 3 or q.numel() == 0:
        raise AttentionContractError(
            "q.shape", list(q.shape), "[num_heads, q_len, head_dim], none of them 0"
        )
    num_heads, _, head_dim = q.shape
    if k.dim() != 3 or k.numel() == 0 or k.shape[2] != head_dim:
        raise AttentionContractError(
            "k.shape", list(k.shape), f"[num_kv_heads, kv_len, {head_dim}], none of them 0"
        )
    if v_base.shape != k.shape:
        raise AttentionContractError(
            "v_base.shape", list(v_base.shape), f"the shape of k, {list(k.shape)}"
        )
    if num_heads % k.shape[0]:
        raise AttentionContractError(
            "num_heads", num_heads, f"a multiple of num_kv_heads={k.shape[0]}"
        )
    if not q.is_floating_point():
        raise AttentionContractError("q.dtype", q.dtype, "a floating point dtype")
    _check_like("q", q, q)
    _check_like("k", k, q)
    _check_like("v_base", v_base, q)


def _check_like(what: str, tensor: Tensor, q: Tensor) -> None:
    """Same dtype and device as the query, contiguous in the last dimension."""
    if tensor.dtype != q.dtype:
        raise AttentionContractError(f"{what}.dtype", tensor.dtype, f"the dtype of q, {q.dtype}")
    if tensor.device != q.device:
        raise AttentionContractError(
            f"{what}.device", tensor.device, f"the device of q, {q.device}"
        )
    if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        raise AttentionContractError(f"{what}.stride(-1)", tensor.stride(-1), "1")


def _check_positions(q: Tensor, q_positions: int | Tensor, kv_start: int) -> None:
    if kv_start < 0:
        raise AttentionContractError("kv_start", kv_start, "0 or more")
    if isinstance(q_positions, int):
        if q_positions < 0:
            raise AttentionContractError("q_positions", q_positions, "0 or more")
        return
    if q_positions.dtype != torch.int64 or q_positions.shape != q.shape[1:2]:
        raise AttentionContractError(
            "q_positions",
            f"{q_positions.dtype} {list(q_positions.shape)}",
            f"an int, or torch.int64 [{q.shape[1]}]",
        )
    on_cpu = q_positions.device.type == "cpu"
    if not on_cpu and q_positions.device != q.device:
        raise AttentionContractError(
            "q_positions.device", q_positions.device, f"cpu, or the device of q, {q.device}"
        )
    # Reading the order of positions that live on an accelerator would wait for it.
    if on_cpu and bool((q_positions[1:] < q_positions[:-1]).any()):
        raise AttentionContractError("q_positions", "positions out of order", "ascending positions")


def _check_strip(what: str, strip: ValueStrip | KeyStrip, inputs: AttentionInputs) -> None:
    num_kv_heads, kv_len, head_dim = inputs.k.shape
    z, b = strip.z, strip.b
    if z.dim() != 2 or z.shape[0] != kv_len or z.shape[1] == 0:
        raise AttentionContractError(
            f"{what}.z.shape", list(z.shape), f"[{kv_len}, rank] with rank 1 or more"
        )
    if b.shape != (num_kv_heads, z.shape[1], head_dim):
        raise AttentionContractError(
            f"{what}.b.shape", list(b.shape), f"{[num_kv_heads, z.shape[1], head_dim]}"
        )
    _check_like(f"{what}.z", z, inputs.q)
    _check_like(f"{what}.b", b, inputs.q)


def _check_rotary(strip: KeyStrip, inputs: AttentionInputs) -> None:
    table_shape = inputs.k.shape[1:]
    if table_shape[1] % 2:
        raise AttentionContractError("head_dim", table_shape[1], "an even number, with k_lora")
    for what, table in (("k_lora.cos", strip.cos), ("k_lora.sin", strip.sin)):
        if table.shape != table_shape:
            raise AttentionContractError(f"{what}.shape", list(table.shape), f"{list(table_shape)}")
        _check_like(what, table, inputs.q)


def check_settings(scale: float, window: int | None, softcap: float | None) -> None:
    """Refuse a scale, window or softcap that means nothing."""
    if not scale > 0:
        raise AttentionContractError("scale", scale, "above 0")
    if window is not None and window <= 0:
        raise AttentionContractError("window", window, "None, or 1 or more")
    if softcap is not None and not softcap > 0:
        raise AttentionContractError("softcap", softcap, "None, or above 0")
