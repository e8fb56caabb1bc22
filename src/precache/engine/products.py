"""Products of rows with weights, in the way that suits the model's dtype and the processor."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from precache.ops.key_blocks import Workspace
from precache.ops.numerics import product_dtype

_FEW_ROWS = 3  # each multiplied alone, which takes less than widening the weights
_WIDENED = 2**22  # weights at a time: 16 MiB in float32


class Products:
    """x [..., in] times weights [out, in], in the dtype of ``like``.

    CPUs without instructions for 16-bit products emulate them at a hundredth of the speed. There many rows are
    multiplied in float32 and rounded once, with weights that are widened while they are used; a single row, a decode
    step, is bound by reading the weights, and torch reads them as they are: half the bytes of float32.

    Not for two threads at once: the widened weights lie in one workspace.
    """

    def __init__(self, like: Tensor) -> None:
        self._widens = product_dtype(like) != like.dtype
        self._workspace = Workspace(like.device)

    def apply(self, module: nn.Module, x: Tensor) -> Tensor:
        """What the module makes of x."""
        if self._widens and type(module) is nn.Linear:
            y = self.linear(x, module.weight)
            return y if module.bias is None else y.add_(module.bias)
        applied: Tensor = module(x)
        return applied

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x W^T, [..., out]."""
        rows = x.numel() // x.shape[-1]
        if not self._widens or rows == 1:
            return functional.linear(x, weight)
        flat = x.reshape(rows, -1)
        if rows <= _FEW_ROWS:
            y = torch.cat([functional.linear(row.unsqueeze(0), weight) for row in flat])
        else:
            y, wide_x = x.new_empty(rows, weight.shape[0]), flat.float()
            at_once = max(1, _WIDENED // weight.shape[1])
            for start in range(0, weight.shape[0], at_once):
                outputs = slice(start, start + at_once)
                y[:, outputs] = functional.linear(wide_x, self._widened(weight[outputs]))
        return y.view(*x.shape[:-1], -1)

    def _widened(self, weight: Tensor) -> Tensor:
        return self._workspace.take("weight", tuple(weight.shape), torch.float32).copy_(weight)

    def add(self, y: Tensor, x: Tensor, weight: Tensor) -> None:
        """y [rows, out] += x [rows, in] W^T."""
        if self._widens:
            y.add_(self.linear(x, weight))
        else:
            y.addmm_(x, weight.t())
