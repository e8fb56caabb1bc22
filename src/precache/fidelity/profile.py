"""Which layers should a reader recompute? Measured for `droidspeak` and `droidspeak-scattered`, by KL to nonshared.

DroidSpeak profiles candidate groups of consecutive layers on sample data; its budget here is fixed, so the candidates
are all windows of that many layers. LRAgent's variant takes the layers that matter most alone: each layer is
recomputed by itself, and those that lower the KL most are taken.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from precache import Engine
from precache.engine.policies.profile import RecomputeProfile
from precache.engine.policies.recompute import layer_budget
from precache.errors import ConfigError
from precache.fidelity.recordings import Progress, Recording, check_recordings
from precache.fidelity.replay import EXACT, replay
from precache.fidelity.scores import Score, score

CONTIGUOUS, SCATTERED = "droidspeak", "droidspeak-scattered"
PROFILED = (CONTIGUOUS, SCATTERED)

Layers = tuple[int, ...]


@dataclass(frozen=True)
class LayerProfile:
    """The chosen layers of one policy, and the KL (nats per token said) of every candidate."""

    policy: str
    layers: Layers
    kl: dict[Layers, float]


def profile_layers(
    engine: Engine,
    policy: str,
    recordings: Sequence[Recording],
    progress: Progress = iter,
    stride: int = 1,
) -> LayerProfile:
    """Measure every candidate and choose. ``stride`` leaves out windows (contiguous) or layers (scattered) between.

    Raises ConfigError for a policy that has no layers to choose, and FidelityError.
    """
    check_recordings(recordings, engine.agents(), engine.context_window)
    num_layers = engine.model.shape.num_layers
    budget = layer_budget(engine.config.recompute_share, num_layers)
    if policy not in PROFILED:
        raise ConfigError("--profile", policy, f"names among {list(PROFILED)}")
    if budget < 1:
        raise ConfigError("recompute_share", engine.config.recompute_share, "at least one layer")
    width = budget if policy == CONTIGUOUS else 1
    firsts = range(0, num_layers - width + 1, stride)
    candidates = [tuple(range(first, first + width)) for first in firsts]
    kl = _measure(engine, policy, candidates, recordings, progress)
    best = sorted(candidates, key=kl.__getitem__)
    chosen = best[0] if policy == CONTIGUOUS else tuple(sorted(n for (n,) in best[:budget]))
    return LayerProfile(policy, chosen, kl)


def as_file(
    engine: Engine, profiles: Sequence[LayerProfile], num_trajectories: int
) -> RecomputeProfile:
    """What ``EngineConfig.recompute_profile`` reads, with how it was measured."""
    made_by = {
        "metric": "KL(nonshared || policy), nats per token said",
        "share": engine.config.recompute_share,
        "trajectories": num_trajectories,
        "adapters": {adapter.name: adapter.digest for adapter in engine.bank},
        "kl": {
            p.policy: [[list(layers), value] for layers, value in p.kl.items()] for p in profiles
        },
    }
    sections = {profile.policy: {"layers": list(profile.layers)} for profile in profiles}
    return RecomputeProfile(engine.model.shape.num_layers, sections, made_by)


def _measure(
    engine: Engine,
    policy: str,
    candidates: Sequence[Layers],
    recordings: Sequence[Recording],
    progress: Progress,
) -> dict[Layers, float]:
    totals = dict.fromkeys(candidates, Score())
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="precache-profile-")))
        exact = stack.enter_context(engine.with_policy(EXACT))
        for recording in progress(recordings):
            logits = [found for _, found in replay(exact, recording)]
            exact.reset()
            for layers in candidates:
                totals[layers] += _score(engine, policy, layers, recording, logits, folder)
    return {layers: total.kl / total.tokens for layers, total in totals.items()}


def _score(
    engine: Engine,
    policy: str,
    layers: Layers,
    recording: Recording,
    exact: Sequence[Tensor],
    folder: Path,
) -> Score:
    path = folder / "profile.json"
    RecomputeProfile(engine.model.shape.num_layers, {policy: {"layers": list(layers)}}).save(path)
    total = Score()
    with engine.with_policy(policy, recompute_profile=path) as candidate:
        for (turn, ours), theirs in zip(replay(candidate, recording), exact, strict=True):
            total += score(theirs, ours, recording.token_ids[turn.start : turn.end])
    return total
