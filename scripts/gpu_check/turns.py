"""The controlled trace on a Llama-3.1-8B with random weights, under every policy, as far as the time reaches."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from precache import Engine
from precache.bench.adapters import agent_names, write_random_adapters
from precache.bench.player import EnginePlayer, Run, play_trace
from precache.bench.shapes import model_config
from precache.bench.summary import RowKey, summarise
from precache.bench.trace import Step, Trace, controlled_trace
from precache.config import EngineConfig
from precache.engine.hooks import ATTENTION_NAME, register_attention
from precache.engine.model import BackboneModel, resolve_backend
from precache.errors import PrecacheError
from scripts.gpu_check.deadline import Deadline

AGENTS = agent_names(3)
CHUNKS = (16384, 4096, 1024)  # 66.4k, 17.3k and 5.0k tokens
LLAMA_3_1_8B = model_config("llama-3.1-8b")
TINY = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=256,
)
TINY_TRACE = Trace(
    (Step("plan", 9, 3), Step("action", 2, 3), Step("reflect", 2, 3), Step("plan", 2, 3))
)
# Policy, schedule, and about how long it takes against prelrshared; what matters most comes first.
ROWS = (
    ("prelrshared", None, 1.0),
    ("nonshared", None, 3.0),
    ("fullshared", None, 1.0),
    ("rebaseshared", "lazy-prefill", 2.0),
    ("rebaseshared", "double-batch", 2.0),
    ("baselrshared", None, 1.0),
    ("baseshared", None, 3.0),
    ("droidspeak", None, 2.0),
    ("cacheblend", None, 2.0),
    ("relaycaching", None, 2.0),
)
# The paper, Llama-3.1-8B on an A6000 at 66.4k tokens: total TTFT in s, tokens/s.
PAPER = {
    "nonshared": (73.18, 775.6),
    "prelrshared": (27.08, 1685.4),
    "fullshared": (23.15, 1841.7),
}
_SHARE_OF_MEMORY = 0.75  # of what is free, for the cache


def replay(
    device: torch.device, deadline: Deadline, backend: str, *, tiny: bool
) -> Iterator[dict[str, Any]]:
    """Yields the result so far, after every row. The first row is run whatever the time."""
    found: dict[str, Any] = {"backend": backend, "paper": PAPER, "rows": [], "skipped": []}
    with tempfile.TemporaryDirectory(prefix="precache-gpu-") as folder, torch.inference_mode():
        model = _random_model(TINY if tiny else LLAMA_3_1_8B, device, backend)
        engines = _Engines(model, Path(folder), device, tiny=tiny)
        for chunk in (0,) if tiny else CHUNKS:
            trace = TINY_TRACE if tiny else controlled_trace(chunk, AGENTS)
            measured = _Measured(chunk, trace)
            before = list(found["rows"])
            for policy, schedule, weight in ROWS:
                name = f"{policy} {schedule or ''} {trace.tokens}".strip()
                if found["rows"] and deadline.left() < 1.3 * weight * measured.unit_s:
                    found["skipped"].append(f"{name}: {deadline.left():.0f} s are left")
                    continue
                started = time.monotonic()
                try:
                    run, peak = engines.play(policy, schedule, trace)
                except (PrecacheError, torch.OutOfMemoryError) as error:
                    found["skipped"].append(f"{name}: {error}")
                    print(found["skipped"][-1])
                    continue
                measured.add(
                    RowKey(policy, schedule), run, peak, time.monotonic() - started, weight
                )
                found["rows"] = before + measured.rows()
                _print(found["rows"][-1])
                yield found
    yield found


class _Measured:
    """The runs of one trace, and the rows that they make."""

    def __init__(self, chunk: int, trace: Trace) -> None:
        self.unit_s = 0.0  # the longest that a row took, over its weight
        self._chunk = chunk
        self._trace = trace
        self._runs: dict[RowKey, list[Run]] = {}
        self._peaks: dict[RowKey, int | None] = {}

    def add(self, key: RowKey, run: Run, peak: int | None, seconds: float, weight: float) -> None:
        self._runs[key], self._peaks[key] = [run], peak
        self.unit_s = max(self.unit_s, seconds / weight)

    def rows(self) -> list[dict[str, Any]]:
        rows = summarise(self._chunk, self._trace, self._runs)
        peaks = self._peaks.values()
        return [
            asdict(row) | {"peak_gpu_bytes": peak} for row, peak in zip(rows, peaks, strict=True)
        ]


def _random_model(config: PreTrainedConfig, device: torch.device, backend: str) -> BackboneModel:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    register_attention()
    with device:
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=ATTENTION_NAME, dtype=dtype
        )
    chosen = resolve_backend(backend, device, dtype)
    return BackboneModel(model, config, ("random",), chosen)


class _Engines:
    """Plays traces on engines that share the model."""

    def __init__(
        self, model: BackboneModel, folder: Path, device: torch.device, *, tiny: bool
    ) -> None:
        self._device = device
        memory = 2**26 if tiny else int(_SHARE_OF_MEMORY * torch.cuda.mem_get_info(device)[0])
        settings = EngineConfig(
            policy="nonshared",
            cache_memory=memory,
            prefill_chunk=4096,
            growth_tokens=16 if tiny else 8192,
        )
        self._own_a = Engine(model, None, settings)
        self._common_a = Engine(model, None, settings)
        self._tiny = tiny
        for name, path in write_random_adapters(model.shape, AGENTS, folder / "own", 0).items():
            self._own_a.add_adapter(name, path)
        for name in AGENTS:
            path = write_random_adapters(model.shape, [name], folder / "common", 0)[name]
            self._common_a.add_adapter(name, path)

    def play(self, policy: str, schedule: str | None, trace: Trace) -> tuple[Run, int | None]:
        """One run from an empty cache, and the most memory of the GPU that was taken in it."""
        base = self._common_a if policy == "baselrshared" else self._own_a
        with base.with_policy(policy, schedule) as engine:
            player = EnginePlayer(engine)
            self._run(player, TINY_TRACE if self._tiny else controlled_trace(512, AGENTS, rounds=1))
            if self._tiny:
                return self._run(player, trace), None
            torch.cuda.reset_peak_memory_stats(self._device)
            run = self._run(player, trace)
            return run, torch.cuda.max_memory_allocated(self._device)

    def _run(self, player: EnginePlayer, trace: Trace) -> Run:
        vocab_size = player.engine.model.shape.vocab_size
        return play_trace(player, trace, vocab_size=vocab_size, seed=0)


def _print(row: dict[str, Any]) -> None:
    paper = PAPER.get(row["policy"]) if row["chunk"] == CHUNKS[0] else None
    compared = "" if paper is None else f"   paper, A6000: {paper[0]:.2f} s, {paper[1]:.1f} tok/s"
    memory = "" if row["peak_gpu_bytes"] is None else f"{row['peak_gpu_bytes'] / 1e9:>7.2f} GB"
    print(
        f"{row['trace_tokens']:>6} {row['policy']:<13} {row['schedule'] or '':<13} "
        f"TTFT {row['total_ttft_s']:>7.2f} s {row['tokens_per_s']:>8.1f} tok/s "
        f"decode {row['decode_tokens_per_s']:>6.1f}/s {memory}{compared}",
        flush=True,
    )
