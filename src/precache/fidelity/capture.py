"""What a pass computes inside: the inputs of every layer, and k and v_base. Read, never changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from precache import Engine
from precache.fidelity.recordings import Recording
from precache.fidelity.replay import replay

SPLIT = "prelrshared"  # caches k and v_base apart from the strips; a reader's own tokens are exact

Where = Literal["layer", "projection"]  # the residual stream, or X: the same after the input norm


@dataclass(frozen=True)
class States:
    """Of the tokens of one trajectory that were run, per layer.

    ``hidden`` [tokens, hidden] enters the layer, or is X, what its projections read (see ``Where``). ``k`` (after RoPE)
    and ``v_base`` are [tokens, num_kv_heads * head_dim]. ``writers`` says whose pass each token's states are from.
    """

    hidden: tuple[Tensor, ...]
    k: tuple[Tensor, ...]
    v_base: tuple[Tensor, ...]
    writers: tuple[str, ...]


def shared_states(engine: Engine, recording: Recording) -> States:
    """States as the agents leave them when they take turns. ``engine`` has the policy SPLIT."""
    with _hidden_states(engine, "layer") as seen:
        for _ in replay(engine, recording):
            pass
    return _states(engine, seen)


def own_states(engine: Engine, recording: Recording, agent: str, where: Where = "layer") -> States:
    """States of the same tokens when one agent runs them all; ``base``: the neutral ones."""
    token_ids = list(recording.token_ids[: recording.num_run + 1])
    engine.reset()
    with _hidden_states(engine, where) as seen:
        engine.score(agent, token_ids[:-1], token_ids[-1:])
    return _states(engine, seen)


@contextmanager
def _hidden_states(engine: Engine, where: Where) -> Iterator[list[list[Tensor]]]:
    """Collect the inputs of every layer, in the order in which tokens are run."""
    layers = engine.model.decoder.layers
    modules = [layer if where == "layer" else layer.self_attn.v_proj for layer in layers]
    seen: list[list[Tensor]] = [[] for _ in modules]

    def keep(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen[modules.index(module)].append(args[0][0].float())

    handles = [module.register_forward_pre_hook(keep) for module in modules]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _states(engine: Engine, seen: list[list[Tensor]]) -> States:
    (trajectory,) = engine.store.trajectories
    hidden = tuple(torch.cat(parts) for parts in seen)
    assert len(hidden[0]) == trajectory.length, "some token was run twice"
    pairs = [trajectory.base.read(layer, trajectory.length) for layer in range(len(hidden))]
    writers = tuple(run.writer.name for run in trajectory.runs for _ in range(run.start, run.end))
    return States(
        hidden, tuple(_rows(k) for k, _ in pairs), tuple(_rows(v) for _, v in pairs), writers
    )


def _rows(heads: Tensor) -> Tensor:
    """[num_kv_heads, tokens, head_dim] -> a copy [tokens, num_kv_heads * head_dim], fp32."""
    return heads.transpose(0, 1).flatten(1).float()
