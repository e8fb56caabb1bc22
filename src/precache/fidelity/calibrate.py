"""Fit the corrections of the policy ``calibrated``: closed form, no gradients.

What a reader j misses in a row that a writer i wrote is j's own k and v minus what it reads there. It is predicted from
the writer's X by ridge regression, for k and v together, and cut to rank m (reduced-rank regression): the output basis
Q_j is shared by all writers, the input maps P_ij are each writer's own. Text is run by every agent alone, so each
token counts for every pair.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from precache import Engine
from precache.adapters.bank import Adapter
from precache.errors import ConfigError
from precache.fidelity.capture import SPLIT, States, own_states
from precache.fidelity.recordings import Progress, Recording, check_recordings

FORMAT = "precache-calibration-1"
POLICY = "calibrated"


_Key = TypeVar("_Key")


class Pair(NamedTuple):
    """Rows of ``writer`` as ``reader`` reads them."""

    writer: str
    reader: str


@dataclass(frozen=True)
class CalibrationConfig:
    """``ridge`` is relative to the mean square of X's columns. Layers before ``first_layer`` are not corrected; layer 0
    needs it never, because its X is the embedding, the same for all."""

    rank: int = 16
    ridge: float = 0.01
    first_layer: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise ConfigError("--rank", self.rank, "an integer of at least 1")
        first = self.first_layer
        if isinstance(first, bool) or not isinstance(first, int) or first < 1:
            raise ConfigError("--first-layer", first, "an integer of at least 1")
        if not self.ridge > 0:
            raise ConfigError("--ridge", self.ridge, "more than 0")


@dataclass(frozen=True)
class Correction:
    """Of one reader in one layer: z = X P of the writer; reading adds RoPE(z Q_k) to k and z Q_v to v.

    ``explained`` is the part of what the reader misses (squares, k and v each relative to their size) that the fit
    predicts on its own data.
    """

    p: Mapping[str, Tensor]  # by writer [hidden, rank]
    q_k: Tensor  # [rank, num_kv_heads * head_dim]
    q_v: Tensor  # likewise
    explained: float


@dataclass(frozen=True)
class Calibration:
    """All corrections, by (layer, reader)."""

    corrections: Mapping[tuple[int, str], Correction]
    rank: int
    tokens: int

    def explained(self, reader: str) -> float:
        """``Correction.explained``, the mean over layers."""
        shares = [c.explained for (_, name), c in self.corrections.items() if name == reader]
        return sum(shares) / len(shares)

    def save(self, path: Path, engine: Engine) -> None:
        """Write the file that ``EngineConfig.calibration`` takes; it belongs to this model and these adapters."""
        tensors: dict[str, Tensor] = {}
        for (layer, reader), correction in self.corrections.items():
            tensors[f"q_k.{layer}.{reader}"] = correction.q_k.contiguous()
            tensors[f"q_v.{layer}.{reader}"] = correction.q_v.contiguous()
            for writer, p in correction.p.items():
                tensors[f"p.{layer}.{writer}.{reader}"] = p.contiguous()
        facts = {
            "format": FORMAT,
            "policy": POLICY,
            "model": engine.model.digest(),
            "rank": self.rank,
            "adapters": {adapter.name: adapter.digest for adapter in engine.bank},
        }
        save_file(tensors, path, metadata={"precache": json.dumps(facts, sort_keys=True)})


def calibrate(
    engine: Engine,
    recordings: Sequence[Recording],
    config: CalibrationConfig,
    progress: Progress = iter,
) -> Calibration:
    """Fit corrections for every adapter as a reader and every other agent, ``base`` included, as a writer.

    Raises FidelityError for recordings that cannot be run, ConfigError for a rank above what k and v have and a first
    layer that the model lacks.
    """
    check_recordings(recordings, engine.agents(), engine.context_window)
    shape = engine.model.shape
    if config.rank > 2 * shape.out_features["v_proj"]:
        raise ConfigError("--rank", config.rank, f"at most {2 * shape.out_features['v_proj']}")
    if config.first_layer >= shape.num_layers:
        raise ConfigError("--first-layer", config.first_layer, f"at most {shape.num_layers - 1}")
    moments = [_Moments() for _ in range(shape.num_layers)]
    tokens = 0
    with engine.with_policy(SPLIT) as split:
        for recording in progress(recordings):
            states = {
                agent: own_states(split, recording, agent, "projection")
                for agent in engine.agents()
            }
            for layer, found in enumerate(moments):
                _add(found, split, layer, states)
            tokens += recording.num_run
            split.reset()
    corrections = {
        (layer, reader): found.fit(reader, config)
        for layer, found in enumerate(moments)
        for reader in engine.bank.names
        if layer >= config.first_layer
    }
    return Calibration(corrections, config.rank, tokens)


class _Moments:
    """Sums over tokens of one layer: X'X by writer, X'Y by pair, and squares of k and v by reader."""

    def __init__(self) -> None:
        self.xx: dict[str, Tensor] = {}
        self.xy: dict[Pair, Tensor] = {}
        self.yy: dict[Pair, Tensor] = {}  # diagonal of Y'Y
        self.squares: dict[str, Tensor] = {}  # of the reader's own k and v, by column

    def fit(self, reader: str, config: CalibrationConfig) -> Correction:
        """Ridge regression for each writer, then the best ``rank`` directions of what all of them predict."""
        pairs = [pair for pair in self.xy if pair.reader == reader]
        scale = _column_scale(self.squares[reader])
        solved = {pair.writer: self._ridge(pair, config.ridge) * scale for pair in pairs}
        targets = {pair.writer: self.xy[pair].double() * scale for pair in pairs}
        gram = torch.stack([solved[w].T @ targets[w] for w in solved]).sum(0)
        strengths, directions = torch.linalg.eigh((gram + gram.T) / 2)
        basis = directions[:, -config.rank :].flip(1)  # the strongest first
        q = basis.T / scale
        missed = sum(float((self.yy[pair].double() * scale.square()).sum()) for pair in pairs)
        kept = float(strengths[-config.rank :].sum())
        half = q.shape[1] // 2
        return Correction(
            {writer: (c @ basis).float() for writer, c in solved.items()},
            q[:, :half].float(),
            q[:, half:].float(),
            explained=kept / missed if missed else 0.0,
        )

    def _ridge(self, pair: Pair, ridge: float) -> Tensor:
        xx = self.xx[pair.writer].double()
        strength = ridge * float(xx.diagonal().mean())
        regular = xx + strength * torch.eye(len(xx), dtype=xx.dtype, device=xx.device)
        solved: Tensor = torch.linalg.solve(regular, self.xy[pair].double())
        return solved


def _column_scale(squares: Tensor) -> Tensor:
    """Weights that make k and v count by their relative errors: one over the mean size of each half."""
    halves = squares.double().chunk(2)
    return torch.cat([(half.mean() + 1e-30).rsqrt().expand(len(half)) for half in halves])


def _add(moments: _Moments, engine: Engine, layer: int, states: Mapping[str, States]) -> None:
    inputs = {agent: found.hidden[layer] for agent, found in states.items()}
    for agent, x in inputs.items():
        _sum(moments.xx, agent, x.T @ x)
    for reader, adapter in ((name, engine.bank.get(name)) for name in engine.bank.names):
        own = _as_read(engine, layer, adapter, states[reader])
        _sum(moments.squares, reader, own.square().sum(0))
        for writer in _others(inputs, reader):
            y = own - _as_read(engine, layer, adapter, states[writer])
            _sum(moments.xy, Pair(writer, reader), inputs[writer].T @ y)
            _sum(moments.yy, Pair(writer, reader), y.square().sum(0))


def _others(agents: Iterable[str], reader: str) -> Iterator[str]:
    return (agent for agent in agents if agent != reader)


def _as_read(engine: Engine, layer: int, reader: Adapter, states: States) -> Tensor:
    """[tokens, 2 * width]: k before RoPE and v as the reader reads them from these states, its LoRA included."""
    x = states.hidden[layer]
    k = _unrotated(engine, layer, states.k[layer]) + _lora(reader, layer, "k_proj", x)
    v = states.v_base[layer] + _lora(reader, layer, "v_proj", x)
    return torch.cat([k, v], dim=1)


def _lora(adapter: Adapter, layer: int, target: str, x: Tensor) -> Tensor | float:
    module = adapter.module(layer, target)
    if module is None:
        return 0.0
    return x @ module.lora_a.float().T @ module.lora_b.float().T


def _unrotated(engine: Engine, layer: int, k: Tensor) -> Tensor:
    """Keys [tokens, num_kv_heads * head_dim] with RoPE undone."""
    cos, sin = (table.float().unsqueeze(1) for table in engine.model.rope_tables(layer, len(k)))
    heads = k.view(len(k), -1, cos.shape[-1])
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat([second, -first], dim=-1)
    return torch.flatten((heads * cos + turned * sin) / (cos.square() + sin.square()), 1)


def _sum(sums: dict[_Key, Tensor], key: _Key, value: Tensor) -> None:
    if key in sums:
        sums[key] += value
    else:
        sums[key] = value
