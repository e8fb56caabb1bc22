"""Trains one role's LoRA: the order of the data, the learning rate, the steps, and resuming.

Every choice is a function of (seed, role, step), so a resumed run and an uninterrupted one agree
bit for bit on one machine.
"""

from __future__ import annotations

import hashlib
import logging
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from precache.training.encoding import Encoded
from precache.training.loss import score_tokens
from precache.training.recipe import TARGETS, Recipe

logger = logging.getLogger(__name__)

_MAX_GRAD_NORM = 1.0
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def role_seed(seed: int, role: str) -> int:
    """Return the seed of one role: roles start from different A matrices and see other orders."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{role}".encode()).digest()[:4], "big")


def add_adapter(base: PreTrainedModel, recipe: Recipe, seed: int) -> PeftModel:
    """Put a fresh LoRA on the base model, in place; weights are float32 whatever the base is."""
    torch.manual_seed(seed)
    config = LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        target_modules=TARGETS[recipe.targets],
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, config)
    model.eval()  # no dropout anywhere, so that a step depends on nothing but its data
    assert isinstance(model, PeftModel)
    return model


def learning_rate(recipe: Recipe, step: int) -> float:
    """Return the rate of a step (from 0): linear warm-up, then a cosine down to a tenth."""
    if step < recipe.warmup_steps:
        return recipe.lr * (step + 1) / (recipe.warmup_steps + 1)
    done = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    return recipe.lr * (0.1 + 0.9 * 0.5 * (1.0 + math.cos(math.pi * done)))


def batch_indices(num_examples: int, batch: int, step: int, seed: int) -> list[int]:
    """Return the examples of a step: epochs are reshuffled, and a batch may span two of them."""
    positions = range(step * batch, (step + 1) * batch)
    return [
        _epoch_order(num_examples, p // num_examples, seed)[p % num_examples] for p in positions
    ]


def _epoch_order(num_examples: int, epoch: int, seed: int) -> list[int]:
    order = list(range(num_examples))
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimiser step did: mean NLL (nats) before the update, and the tokens used."""

    step: int
    loss: float
    num_targets: int
    num_tokens: int
    seconds: float


class RoleTrainer:
    """Trains the active adapter of `model` on one role's examples (`Encoded.only(role)`)."""

    def __init__(
        self, model: PeftModel, role: str, examples: Sequence[Encoded], recipe: Recipe
    ) -> None:
        assert examples, "the caller refuses roles without examples"
        self._model = model
        self.role = role
        self._examples = examples
        self._recipe = recipe
        self._seed = role_seed(recipe.seed, role)
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(), lr=recipe.lr, weight_decay=0.0
        )
        self.losses: list[float] = []

    def run(self, after_step: Callable[[StepResult], None]) -> None:
        """Train until the recipe's last step, calling `after_step` after each."""
        while len(self.losses) < self._recipe.steps:
            after_step(self.step())

    def step(self) -> StepResult:
        """Do one optimiser step over `recipe.batch` trajectories."""
        begin, step = time.perf_counter(), len(self.losses)
        indices = batch_indices(len(self._examples), self._recipe.batch, step, self._seed)
        chosen = [self._examples[index] for index in indices]
        num_targets = sum(len(example.targets[self.role]) for example in chosen)
        total = 0.0
        for example in chosen:
            scores = score_tokens(self._base(), example.input_ids, example.targets[self.role])
            loss = scores.nll.sum() / num_targets
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        self._update(learning_rate(self._recipe, step))
        self.losses.append(total)
        num_tokens = sum(len(example.input_ids) for example in chosen)
        return StepResult(step + 1, total, num_targets, num_tokens, time.perf_counter() - begin)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return copies of the trained weights and of the optimiser's moments, by name."""
        tensors = {f"weight.{name}": p.detach().clone() for name, p in self._parameters.items()}
        for name, parameter in self._parameters.items():
            for moment, value in self._optimizer.state.get(parameter, {}).items():
                tensors[f"{moment}.{name}"] = value.detach().clone()
        return tensors

    def load_state(self, losses: Sequence[float], tensors: dict[str, Tensor]) -> None:
        """Continue after `len(losses)` steps from what `state_tensors` returned then."""
        for name, parameter in self._parameters.items():
            with torch.no_grad():
                parameter.copy_(tensors[f"weight.{name}"])
            if losses:
                self._optimizer.state[parameter] = {
                    moment: tensors[f"{moment}.{name}"].clone() for moment in _MOMENTS
                }
        self.losses = list(losses)

    def _base(self) -> PreTrainedModel:
        base = self._model.get_base_model()
        assert isinstance(base, PreTrainedModel)
        return base

    def _update(self, lr: float) -> None:
        nn.utils.clip_grad_norm_(self._parameters.values(), _MAX_GRAD_NORM)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
