"""How the engine gets into a transformers model: the projections it replaces and the attention it registers.

No fork, no patched method: the Linear modules of the decoder layers are replaced by modules that hold them, and the
attention is registered under its own name together with its mask function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from precache.engine.forward import Forward, Masking
from precache.errors import ModelError

ATTENTION_NAME = "precache"
_FORWARD_ARGUMENT = "precache_forward"


class RunningForward:
    """Holds the pass that is running now; None outside the engine, where the projections are the base model's."""

    def __init__(self) -> None:
        self.current: Forward | None = None


class LoraProjection(nn.Module):
    """A base Linear plus, row by row, the LoRA of whichever adapter runs there (q, o and the MLP)."""

    def __init__(self, base: nn.Module, layer: int, target: str, running: RunningForward) -> None:
        super().__init__()
        self.base = base
        self.layer = layer
        self.target = target
        self._running = running

    def forward(self, x: Tensor) -> Tensor:
        """x [1, rows, in] -> [1, rows, out]."""
        forward = self._running.current
        if forward is None:
            unadapted: Tensor = self.base(x)
            return unadapted
        return self._project(forward, x, folded=False)

    def _project(self, forward: Forward, x: Tensor, *, folded: bool) -> Tensor:
        """The base product plus the LoRA of every lane, with ``folded`` only of folded lanes."""
        y = forward.products.apply(self.base, x)
        forward.work.add_product(x.shape[1], x.shape[2], y.shape[2])
        return forward.add_lora(y, x, self.layer, self.target, folded=folded)


class QueryProjection(LoraProjection):
    """q_proj: skipped where a pass only stores k and v."""

    def __init__(
        self, base: nn.Module, layer: int, target: str, running: RunningForward, width: int
    ) -> None:
        super().__init__(base, layer, target, running)
        self._width = width

    def forward(self, x: Tensor) -> Tensor:
        forward = self._running.current
        if forward is not None and forward.keys_values_only:
            return _unused(x, self._width)
        return super().forward(x)


class CachedProjection(LoraProjection):
    """k_proj and v_proj: give the base part (with the LoRA only in folded lanes) and store X A in the strips."""

    def __init__(
        self, base: nn.Module, layer: int, target: str, running: RunningForward, width: int
    ) -> None:
        super().__init__(base, layer, target, running)
        self._width = width

    def forward(self, x: Tensor) -> Tensor:
        forward = self._running.current
        if forward is None:
            return super().forward(x)
        forward.write_strips(x, self.layer, self.target)
        if not forward.writes(self.layer):
            return _unused(x, self._width)
        return self._project(forward, x, folded=True)


def _unused(x: Tensor, width: int) -> Tensor:
    """A stand-in [1, rows, width] for a projection whose result nobody reads; takes no memory."""
    return x.new_zeros(1).expand(*x.shape[:-1], width)


def install_projections(
    layers: nn.ModuleList, widths: dict[str, int], running: RunningForward
) -> None:
    """Replace the targeted Linear modules of every decoder layer. ``widths`` are their output features."""
    for index, layer in enumerate(layers):
        for target, width in widths.items():
            parent = _parent_of(layer, target)
            base = getattr(parent, target)
            module: LoraProjection
            if target in ("k_proj", "v_proj"):
                module = CachedProjection(base, index, target, running, width)
            elif target == "q_proj":
                module = QueryProjection(base, index, target, running, width)
            else:
                module = LoraProjection(base, index, target, running)
            setattr(parent, target, module)


def _parent_of(layer: nn.Module, target: str) -> nn.Module:
    parent = layer.self_attn if target in ("q_proj", "k_proj", "v_proj", "o_proj") else layer.mlp
    assert isinstance(parent, nn.Module)
    return parent


def register_attention() -> None:
    """Register the attention and its mask function. Safe to call again.

    Raises ModelError if the mask function did not register: without it a full prefill looks right and extending a
    cached prefix is wrong.
    """
    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _mask)
    masks: Any = AttentionMaskInterface
    if ATTENTION_NAME not in masks().valid_keys():
        raise ModelError("transformers did not take the mask function of the precache attention")


def _mask(*args: Any, **kwargs: Any) -> None:
    """No mask tensor: the attention masks by the positions of its lanes."""
    return None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of every layer. query [1, num_heads, rows, head_dim]; returns [1, rows, num_heads, head_dim]."""
    forward = kwargs.get(_FORWARD_ARGUMENT)
    if not isinstance(forward, Forward):
        raise ModelError("a model that precache loaded runs only through the engine")
    masking = Masking(scaling, sliding_window, softcap)
    layer = module.layer_idx
    assert isinstance(layer, int)
    return forward.attend(layer, query, key, value, masking), None


def run_layer(
    layer: nn.Module, hidden_states: Tensor, rope: tuple[Tensor, Tensor], forward: Forward
) -> Tensor:
    """One decoder layer over [1, rows, hidden]."""
    output = layer(
        hidden_states,
        position_embeddings=rope,
        attention_mask=None,
        **{_FORWARD_ARGUMENT: forward},
    )
    assert isinstance(output, torch.Tensor)
    return output
