"""vLLM in this process, and one trajectory played by it and by the slow reference, turn by turn on the same tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.reference.policies import ReferenceState

# On a busy machine the first import of vLLM alone takes minutes.
VLLM = [pytest.mark.vllm, pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]

BLOCK = 32
FIRST_ID, VOCAB = 10, 120  # above the special tokens
TOLERANCE = 1e-4  # fp32 on a CPU
NOTICEABLE = 1e-2
MIB = 1 << 20
SIZES = {"head_dim": 32, "max_position_embeddings": 2048}  # vLLM's CPU attention starts at 32


class Step(NamedTuple):
    """A turn: who runs ("base" without an adapter), how many new prompt tokens come, how many tokens are said."""

    agent: str
    prompt: int
    output: int


@dataclass(frozen=True)
class Said:
    """What a turn of vLLM gave."""

    token_ids: list[int]
    logprobs: Tensor  # [output tokens, vocabulary]
    cached: int


class PagedEngine:
    """vLLM with adapters, under a policy of the plugin or (None) as it is."""

    def __init__(
        self,
        model: str,
        adapters: Mapping[str, Path],
        policy: str | None,
        *,
        preload: bool = True,
        **settings: Any,
    ) -> None:
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        defaults: dict[str, Any] = {
            "dtype": "float32",
            "enable_lora": True,
            "max_loras": len(adapters),
            "max_lora_rank": 8,
            "block_size": BLOCK,
            "max_model_len": 1024,
            "kv_cache_memory_bytes": 32 * MIB,
            "enable_prefix_caching": True,
            "max_logprobs": -1,
            "seed": 0,
            "disable_log_stats": False,
        }
        if policy is not None:
            defaults["additional_config"] = {"precache": {"policy": policy}}
        self.llm: Any = LLM(model, **{**defaults, **settings})
        self.requests = {
            name: LoRARequest(name, number, str(path))
            for number, (name, path) in enumerate(adapters.items(), start=1)
        }
        self.policy = policy
        self.num_preemptions = 0
        if preload:
            for request in self.requests.values():
                self.llm.llm_engine.add_lora(request)

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def count_preemptions(self) -> None:
        """Count them in `num_preemptions` from here on."""
        scheduler: Any = self.scheduler
        preempt = scheduler._preempt_request

        def counting(*args: Any, **kwargs: Any) -> None:
            self.num_preemptions += 1
            preempt(*args, **kwargs)

        scheduler._preempt_request = counting

    def say(self, turns: Sequence[tuple[str, Sequence[int], int]]) -> list[Said]:
        """Run turns (agent, prompt, output tokens) together, greedily."""
        from vllm import SamplingParams

        outputs = self.llm.generate(
            [{"prompt_token_ids": list(prompt)} for _, prompt, _ in turns],
            [
                SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=-1)
                for _, _, count in turns
            ],
            lora_request=[self.requests.get(agent) for agent, _, _ in turns],
            use_tqdm=False,
        )
        self.drain()
        return [
            Said(
                list(output.outputs[0].token_ids),
                torch.stack([_row(entry) for entry in output.outputs[0].logprobs]),
                output.num_cached_tokens,
            )
            for output in outputs
        ]

    def drain(self) -> None:
        """Step until nothing is left to run, shadow passes included."""
        core = self.llm.llm_engine.engine_core.engine_core
        while core.scheduler.has_requests():
            core.step_fn()

    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def all_blocks(self) -> int:
        """Blocks that can be free; one more is vLLM's null block."""
        return int(self.scheduler.kv_cache_manager.block_pool.num_gpu_blocks) - 1


@contextmanager
def paged_engine(*args: Any, **settings: Any) -> Iterator[PagedEngine]:
    """A PagedEngine that is gone at the end, with its process-wide state."""
    from vllm.distributed import cleanup_dist_env_and_memory

    engine = PagedEngine(*args, **settings)
    try:
        yield engine
    finally:
        engine.llm.llm_engine.engine_core.shutdown()
        del engine.llm
        cleanup_dist_env_and_memory()


def _row(entry: Mapping[int, Any]) -> Tensor:
    row = torch.full((max(entry) + 1,), -torch.inf)
    for token_id, logprob in entry.items():
        row[token_id] = logprob.logprob
    return row


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(FIRST_ID, VOCAB) for _ in range(count)]


@dataclass
class Played:
    """A trajectory as vLLM ran it: every turn's prompt and what was said."""

    turns: list[tuple[str, list[int], Said]]

    @property
    def cached(self) -> list[int]:
        return [said.cached for _, _, said in self.turns]


def play(engine: PagedEngine, steps: Sequence[Step], seed: int = 0) -> Played:
    """Play a trajectory, one turn after the other."""
    trajectory: list[int] = []
    played = Played([])
    for number, step in enumerate(steps):
        trajectory += tokens(step.prompt, seed=1000 * seed + number)
        (said,) = engine.say([(step.agent, trajectory, step.output)])
        played.turns.append((step.agent, list(trajectory), said))
        trajectory += said.token_ids
    return played


def expected_logprobs(state: ReferenceState, played: Played) -> list[Tensor]:
    """What the reference says at the same tokens. It reuses whole blocks only, as vLLM does."""
    return [
        reference_turn(state, agent, prompt, said.token_ids) for agent, prompt, said in played.turns
    ]


def reference_turn(
    state: ReferenceState, agent: str, prompt: Sequence[int], output: Sequence[int]
) -> Tensor:
    """Log-probabilities [output tokens, vocabulary] of a turn that continues what the reference holds."""
    whole = min(len(state.tokens), len(prompt) - 1) // BLOCK * BLOCK
    state.truncate(whole)
    assert list(prompt[:whole]) == state.tokens, "the prompt does not continue the reference"
    logits = state.turn(None if agent == "base" else agent, [*prompt[whole:], *output[:-1]])
    return torch.log_softmax(logits[-len(output) :], dim=-1)


def difference(ours: Played, theirs: Sequence[Tensor]) -> float:
    return max(
        float((said.logprobs - row).abs().max())
        for (_, _, said), row in zip(ours.turns, theirs, strict=True)
    )
