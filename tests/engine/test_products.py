"""Products in the model's dtype: those that a processor emulates are made in float32, and rounded once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from precache.engine import products
from precache.engine.products import Products
from tests.engine.setup import Setup
from tests.engine.trajectories import tokens

HALF = (torch.bfloat16, torch.float16)


def case(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, 96, generator=generator).to(dtype) for n in (rows, 40))
    return x, weight


def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "product_dtype", lambda _: torch.float32)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 50])
def test_an_emulated_product_is_the_exact_one_rounded_once(
    rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated(monkeypatch)
    monkeypatch.setattr(products, "_WIDENED", 7 * 96)  # so that 40 outputs take several parts
    x, weight = case(rows, dtype)
    exact = x.double() @ weight.double().t()
    got = Products(x).linear(x, weight)
    assert got.dtype == dtype
    assert bool(((got - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + 1e-5).all())
    assert torch.equal(Products(x).linear(x.view(1, rows, 96), weight)[0], got)


def test_many_rows_are_multiplied_in_float32_only_where_products_are_emulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, weight = case(50, torch.bfloat16)
    seen: list[torch.dtype] = []
    linear = products.functional.linear

    def watched(x: Tensor, weight: Tensor) -> Tensor:
        seen.append(x.dtype)
        return linear(x, weight)

    monkeypatch.setattr(products.functional, "linear", watched)
    for product_dtype in (torch.bfloat16, torch.float32):
        monkeypatch.setattr(products, "product_dtype", lambda _, dtype=product_dtype: dtype)
        Products(x).linear(x, weight)
        Products(x).linear(x[:1], weight)
    assert seen == [torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("rows", [1, 3, 50])
def test_earlier_results_stay_when_the_workspace_is_used_again(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated(monkeypatch)
    x, weight = case(rows, torch.bfloat16)
    made = Products(x)
    first = made.linear(x, weight)
    kept = first.clone()
    made.linear(x, weight * 2)
    assert torch.equal(first, kept)


@pytest.mark.parametrize("rows", [1, 50])
def test_a_bias_is_added_and_other_modules_are_called(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    emulated(monkeypatch)
    x, _ = case(rows, torch.bfloat16)
    made = Products(x)
    for kind, tolerance in ((nn.Linear, 0.02), (Doubled, 0.0)):
        module = kind(96, 40, dtype=torch.bfloat16)
        with torch.no_grad():
            torch.testing.assert_close(
                made.apply(module, x), module(x), atol=tolerance, rtol=tolerance
            )


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_adding_adds_in_place(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = case(5, dtype)
    for wide in (dtype, torch.float32):
        monkeypatch.setattr(products, "product_dtype", lambda _, dtype=wide: dtype)
        y = torch.ones(5, 40, dtype=dtype)
        Products(x).add(y, x, weight)
        torch.testing.assert_close(y, 1 + x @ weight.t(), atol=0.1, rtol=0.02)


def test_every_product_of_a_pass_is_made_while_the_model_is_held(
    llama: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head's too: engines that share a model share the workspace of its products."""
    engine = llama.engine(dtype="bfloat16")
    held: list[bool] = []
    take = products.Workspace.take

    def watched(self: products.Workspace, *args: object) -> Tensor:
        held.append(engine.model._forward_lock.locked())
        return take(self, *args)

    emulated(monkeypatch)
    monkeypatch.setattr(engine.model, "_products", Products(engine.model.head.weight))
    monkeypatch.setattr(products.Workspace, "take", watched)
    engine.score("plan", tokens(10), tokens(6, seed=1))
    heads_and_layers = 2 * 7
    assert len(held) > heads_and_layers
    assert all(held)
