"""One tiny model: its adapters by label, engines over it, and the slow reference on the same folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from precache import Engine, EngineConfig
from precache.chat import ChatTokenizer
from precache.engine.model import BackboneModel
from precache.engine.policies.profile import RecomputeProfile
from tests.engine.trajectories import STEPS, Step, play_reference
from tests.reference.lora import ALL_LINEAR, QKVO, QV, make_adapter, read_adapter
from tests.reference.models import save_tiny
from tests.reference.policies import ReferenceState
from tests.reference.recompute import RECOMPUTE

AGENTS = ("plan", "action", "reflect")

# What every adapter of a label has in common: options of make_adapter.
COMMON: dict[str, dict[str, Any]] = {
    "qv": {},
    "qkvo": {"targets": QKVO},
    "all_linear": {"targets": ALL_LINEAR, "std": 0.05},
    "patterns": {
        "targets": QKVO,
        "rank_pattern": {"v_proj": 2, r"layers.1.self_attn.k_proj": 6},
        "alpha_pattern": {"q_proj": 3, r"layers.2.self_attn.v_proj": 20},
    },
    "rslora": {"rslora": True, "std": 0.1},
    "some_layers": {"targets": QKVO, "layers_to_transform": [1, 3], "std": 0.3},
    "zero": {"std": 0.0},
}
# Labels whose adapters differ in kind.
BY_AGENT: dict[str, dict[str, dict[str, Any]]] = {
    "mixed": {
        "plan": {"targets": QV, "rank": 3},
        "action": {"targets": ALL_LINEAR, "rank": 2, "alpha": 5, "std": 0.05},
        "reflect": {"targets": ("q_proj", "o_proj"), "rank": 7},
    },
}
SHARED_A = ("shared_a", "shared_a_qkvo")

# What the selective-recompute policies replace in tests: more of four layers than 30 %, and from hidden states.
SHARE = 0.6
LAYERS: dict[str, dict[str, Any]] = {
    "droidspeak": {"layers": [1, 2]},
    "droidspeak-scattered": {"layers": [1, 3]},
    "relaycaching": {"start": 1, "detection": 2, "end": 3},
}
LABELS = (*COMMON, *BY_AGENT)


def reference_settings(policy: str) -> dict[str, Any]:
    """SHARE and LAYERS in the words of the reference."""
    layers = LAYERS.get(policy, {})
    if "start" in layers:
        return {"share": SHARE, "span": tuple(layers.values())}
    return {"share": SHARE, **layers}


class Setup:
    """A model folder and everything that tests make of it, each made once."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.folder = folder
        self.model = str(save_tiny(kind, folder / "model"))
        self._adapters: dict[str, dict[str, Path]] = {}
        self._backbones: dict[str, BackboneModel] = {}
        self._expected: dict[tuple[str, str, Sequence[Step]], list[Tensor]] = {}

    def adapters(self, label: str = "qv") -> dict[str, Path]:
        """Three adapter folders, by agent."""
        if label not in self._adapters:
            root = self.folder / label
            self._adapters[label] = (
                self._with_shared_a(label) if label in SHARED_A else self._separate(label, root)
            )
        return self._adapters[label]

    def _separate(self, label: str, root: Path) -> dict[str, Path]:
        options = BY_AGENT.get(label) or dict.fromkeys(AGENTS, COMMON.get(label, {}))
        return {
            name: make_adapter(self.model, root / name, seed=seed, **options[name])
            for seed, name in enumerate(AGENTS, start=1)
        }

    def _with_shared_a(self, label: str) -> dict[str, Path]:
        targets = QKVO if label == "shared_a_qkvo" else QV
        plan = self.adapters("qkvo" if label == "shared_a_qkvo" else "qv")["plan"]
        root = self.folder / label
        return {"plan": plan} | {
            name: make_adapter(
                self.model, root / name, seed=seed, targets=targets, share_a_with=plan
            )
            for seed, name in ((12, "action"), (13, "reflect"))
        }

    def other_adapter(self, seed: int = 77, **options: Any) -> Path:
        """An adapter that is none of the three."""
        name = "-".join(map(str, ("other", seed, *options.values())))
        folder = self.folder / "others" / name
        return folder if folder.exists() else make_adapter(self.model, folder, seed=seed, **options)

    @cached_property
    def profile(self) -> Path:
        """A recompute profile with LAYERS."""
        path = self.folder / "recompute.json"
        RecomputeProfile(4, LAYERS).save(path)
        return path

    def backbone(self, dtype: str = "float32") -> BackboneModel:
        if dtype not in self._backbones:
            self._backbones[dtype] = BackboneModel.load(self.model, EngineConfig(dtype=dtype))
        return self._backbones[dtype]

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        return ChatTokenizer.from_pretrained(self.model)

    def engine(
        self,
        policy: str = "prelrshared",
        schedule: str | None = None,
        adapters: Mapping[str, Path] | None = None,
        dtype: str = "float32",
        growth_tokens: int = 64,  # small beside the tests' budgets
        **settings: Any,
    ) -> Engine:
        """An engine with an empty cache over the shared model."""
        settings = {"recompute_share": SHARE, "recompute_profile": self.profile} | settings
        config = EngineConfig(
            policy=policy,
            schedule=schedule,
            dtype=dtype,
            growth_tokens=growth_tokens,
            **settings,
        )
        engine = Engine(self.backbone(dtype), self.tokenizer, config)
        for name, path in (self.adapters() if adapters is None else adapters).items():
            engine.add_adapter(name, path)
        return engine

    @cached_property
    def stock(self) -> PreTrainedModel:
        """The same weights in stock transformers, with a config of its own."""
        return AutoModelForCausalLM.from_pretrained(
            self.model, dtype=torch.float32, attn_implementation="eager"
        )

    def reference(
        self, policy: str, adapters: Mapping[str, Path] | None = None, **settings: Any
    ) -> ReferenceState:
        chosen = self.adapters() if adapters is None else adapters
        read = {name: read_adapter(path) for name, path in chosen.items()}
        if policy in RECOMPUTE:
            settings = reference_settings(policy) | settings
        return ReferenceState(self.stock, read, policy, **settings)

    def expected(
        self, policy: str, label: str = "qv", steps: Sequence[Step] = STEPS
    ) -> list[Tensor]:
        """The reference's logits of every turn."""
        key = (policy, label, steps)
        if key not in self._expected:
            state = self.reference(policy, self.adapters(label))
            self._expected[key] = play_reference(state, steps)
        return self._expected[key]
