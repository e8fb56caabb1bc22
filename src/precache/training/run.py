"""A whole training run: data -> split -> one adapter per role -> held-out figures.

Owns the order of things and what is written where. The steps themselves are `RoleTrainer`'s.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from precache.errors import UnsupportedModelError
from precache.tasks import TASKS, Trajectory, load_episodes, read_trajectories, split_of
from precache.training.checkpoint import CHECKPOINT_NAME, TrainState, load_state, save_state
from precache.training.encoding import Encoded, OffsetTokenizer, encode_all
from precache.training.errors import CheckpointMismatchError, TrainingDataError
from precache.training.evaluation import RoleScore, evaluate
from precache.training.export import export_adapter
from precache.training.loss import check_head
from precache.training.recipe import TrainConfig
from precache.training.trainer import RoleTrainer, StepResult, add_adapter, role_seed

logger = logging.getLogger(__name__)

Scores = dict[str, RoleScore]


@dataclass(frozen=True, slots=True)
class Corpus:
    """The trajectories by side of the split, and what could not be read, by reason."""

    train: tuple[Trajectory, ...]
    heldout: tuple[Trajectory, ...]
    skipped: dict[str, int]


@dataclass(frozen=True, slots=True)
class TrainReport:
    """`after[adapter][role]` is the score of `adapter` on `role`'s held-out tokens; `before[role]`
    is the base model's."""

    before: Scores
    after: dict[str, Scores]
    seconds: dict[str, float]
    corpus_size: dict[str, int]
    skipped: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        return {
            "before": _plain(self.before),
            "after": {adapter: _plain(scores) for adapter, scores in self.after.items()},
            "seconds": self.seconds,
            "corpus": self.corpus_size,
            "skipped": self.skipped,
        }


def train(config: TrainConfig) -> TrainReport:
    """Train every role of `config`, writing `{out}/{role}` as a PEFT folder after each.

    Checkpoints lie in `{out}/{role}/checkpoint.safetensors` until the whole run is done.
    Raises `PrecacheError` subclasses for data, model or checkpoint that do not fit.
    """
    corpus = load_corpus(config)
    model, tokenizer = _load_base(config)
    return _Run(config, corpus, model, tokenizer).train_all()


def load_corpus(config: TrainConfig) -> Corpus:
    """Read and split the data; evaluation questions never reach the training side."""
    if config.data.is_dir():
        loaded = load_episodes(TASKS[config.task], config.data)
        trajectories, skipped = list(loaded.trajectories), loaded.skipped
    else:
        trajectories, skipped = read_trajectories(config.data), {}
    sides: dict[str, list[Trajectory]] = {"train": [], "heldout": []}
    for trajectory in trajectories:
        sides[split_of(trajectory.question_id)].append(trajectory)
    for side, members in sides.items():
        if not members:
            raise TrainingDataError(
                f"data: {config.data} has no trajectory on the {side} side of the split "
                f"(of {len(trajectories)}); about 15 % of the questions are held out, by hash"
            )
    return Corpus(tuple(sides["train"]), tuple(sides["heldout"]), skipped)


class _Run:
    """The parts of one run that all roles share: base model, encoded data, held-out set."""

    def __init__(
        self,
        config: TrainConfig,
        corpus: Corpus,
        base: PreTrainedModel,
        tokenizer: OffsetTokenizer,
    ) -> None:
        self._config, self._corpus, self._base = config, corpus, base
        limit, roles = config.recipe.max_tokens, config.roles
        heldout = corpus.heldout[: config.heldout_episodes]
        self._train = encode_all(corpus.train, roles, tokenizer, limit)
        self._heldout = encode_all(heldout, roles, tokenizer, limit)

    def train_all(self) -> TrainReport:
        for role in self._config.roles:
            self._refuse_leftovers(role)
        before = evaluate(self._base, self._heldout, self._config.roles)
        logger.info("held-out NLL of the base model: %s", _summary(before))
        after: dict[str, Scores] = {}
        seconds: dict[str, float] = {}
        for role in self._config.roles:
            begin = time.perf_counter()
            after[role] = self._train_role(role, before)
            seconds[role] = round(time.perf_counter() - begin, 1)
        for role in self._config.roles:
            self._checkpoint(role).unlink()
        sizes = {"train": len(self._corpus.train), "heldout": len(self._corpus.heldout)}
        return TrainReport(before, after, seconds, sizes, self._corpus.skipped)

    def _train_role(self, role: str, before: Scores) -> Scores:
        recipe, folder = self._config.recipe, self._config.out / role
        examples = [e.only(role) for e in self._train if role in e.targets]
        model = add_adapter(self._base, recipe, role_seed(recipe.seed, role))
        trainer = RoleTrainer(model, role, examples, recipe)
        fingerprint = self._fingerprint(role, examples)
        if self._checkpoint(role).exists():
            state = load_state(self._checkpoint(role), fingerprint)
            trainer.load_state(state.losses, state.tensors)
        self._run_steps(trainer, model, role, fingerprint)
        scores = evaluate(self._base, self._heldout, self._config.roles)
        logger.info("held-out NLL of %s: %s", role, _summary(scores))
        record = self._record(role, trainer, examples, before, scores)
        export_adapter(model, folder, self._base_name(), record)
        model.unload()
        return scores

    def _run_steps(
        self, trainer: RoleTrainer, model: PeftModel, role: str, fingerprint: dict[str, Any]
    ) -> None:
        folder, steps = self._config.out / role, self._config.recipe.steps
        folder.mkdir(parents=True, exist_ok=True)
        # disable=None: a bar on a terminal, nothing in a pipe
        with tqdm(total=steps, initial=len(trainer.losses), desc=role, disable=None) as bar:

            def after_step(result: StepResult) -> None:
                bar.update()
                bar.set_postfix(loss=f"{result.loss:.3f}")
                logger.info("%s %s", role, result)
                if result.step % self._config.save_every == 0 or result.step == steps:
                    state = TrainState(fingerprint, tuple(trainer.losses), trainer.state_tensors())
                    save_state(self._checkpoint(role), state)
                    export_adapter(model, folder, self._base_name(), record=None)

            trainer.run(after_step)

    def _refuse_leftovers(self, role: str) -> None:
        """Neither overwrite nor silently continue what an earlier run left behind."""
        folder = self._config.out / role
        if not folder.exists() or not any(folder.iterdir()):
            return
        if not self._config.resume:
            raise CheckpointMismatchError(
                f"out: {folder} is not empty; pass --resume to continue an interrupted run "
                "with the same settings, or choose another --out"
            )
        if not self._checkpoint(role).exists():
            raise CheckpointMismatchError(
                f"out: {folder} is not empty and holds no {CHECKPOINT_NAME} to resume from "
                "(a finished run removes it); choose another --out"
            )

    def _checkpoint(self, role: str) -> Path:
        return self._config.out / role / CHECKPOINT_NAME

    def _fingerprint(self, role: str, examples: Sequence[Encoded]) -> dict[str, Any]:
        digest = hashlib.sha256()
        for example in examples:
            digest.update(repr((example.input_ids, example.targets)).encode())
        data = {"role": role, "model": self._config.model, "data": digest.hexdigest()}
        return self._config.recipe.as_dict() | data

    def _record(
        self,
        role: str,
        trainer: RoleTrainer,
        examples: Sequence[Encoded],
        before: Scores,
        after: Scores,
    ) -> dict[str, Any]:
        return {
            "role": role,
            "data": self._config.task if self._config.data.is_dir() else self._config.data.name,
            "base_model": self._base_name(),
            "recipe": self._config.recipe.as_dict(),
            "train_trajectories": len(examples),
            "train_target_tokens": sum(len(e.targets[role]) for e in examples),
            "heldout_trajectories": len(self._heldout),
            "heldout_before": _plain(before),
            "heldout_after": _plain(after),
            "losses": [round(loss, 4) for loss in trainer.losses],
            "versions": {name: importlib.metadata.version(name) for name in _RECORDED_PACKAGES},
        }

    def _base_name(self) -> str:
        from precache.engine.checkpoints import hub_id

        return hub_id(self._config.model)


_RECORDED_PACKAGES = ("torch", "transformers", "peft")


def _load_base(config: TrainConfig) -> tuple[PreTrainedModel, OffsetTokenizer]:
    from precache.engine.checkpoints import resolve_model

    path = resolve_model(config.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    if not tokenizer.is_fast:
        raise UnsupportedModelError(
            f"model {config.model!r} has a slow tokenizer ({type(tokenizer).__name__}); training "
            "needs a fast one, which knows the characters that each token covers"
        )
    dtype = getattr(torch, config.recipe.dtype)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, use_safetensors=True
    )
    check_head(model)
    model.requires_grad_(False)
    model.to(_device(config.device))  # type: ignore[arg-type]
    model.eval()  # type: ignore[no-untyped-call]
    return model, tokenizer.backend_tokenizer


def _device(name: str) -> str:
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def _plain(scores: Scores) -> dict[str, Any]:
    return {role: score.as_dict() for role, score in scores.items()}


def _summary(scores: Scores) -> str:
    return ", ".join(f"{role} {score.nll:.4f}" for role, score in scores.items())
