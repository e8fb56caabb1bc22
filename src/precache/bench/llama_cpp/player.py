"""Plays turns on llama.cpp's server the way it is meant to be used by several LoRA agents: a slot for each of them.

The server drops what a slot has cached when the slot's LoRA changes, and slots share nothing. So this is what
``nonshared`` is for the engine: every agent has a cache of its own, extended by everything since its last turn.
"""

from __future__ import annotations

import http.client
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from precache.bench.llama_cpp.tree import LlamaCppTree
from precache.bench.local_server import HOST, LocalServer, TurnError, events, post, running_server
from precache.bench.player import CacheBytes, Likely, Peer, Work

NUMBERS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}  # its own names
START_TIMEOUT_S = 600.0
SPARE_TOKENS = 64  # a slot must be longer than what it holds
NUM_LIKELY = 20  # tokens that are compared at every output token


@contextmanager
def llama_cpp_player(
    tree: LlamaCppTree,
    model: Path,
    adapters: Mapping[str, Path],
    folder: Path,
    *,
    dtype: torch.dtype,
    context: int,
    threads: int,
    cache_bytes_per_token: int,
) -> Iterator[LlamaCppPlayer]:
    """Convert, start the server, and end it at the end. Files are written into ``folder``.

    ``context`` is the tokens that a slot must hold. Raises ConversionError and ServerError.
    """
    numbers, context = NUMBERS[dtype], context + SPARE_TOKENS
    folder.mkdir()
    weights = folder / "model.gguf"
    tree.convert_model(model, weights, numbers=numbers, context=context)
    loras = [folder / f"adapter-{slot}.gguf" for slot in range(len(adapters))]
    for path, target in zip(adapters.values(), loras, strict=True):
        tree.convert_adapter(path, target, model=model, numbers=numbers)

    def command(port: int) -> list[str]:
        options = {
            "model": weights,
            "lora": ",".join(map(str, loras)),
            "host": HOST,
            "port": port,
            "threads": threads,
            "parallel": len(adapters),
            "ctx-size": context * len(adapters),  # divided among the slots
            "cache-type-k": numbers,
            "cache-type-v": numbers,
            "flash-attn": "off",  # on a CPU in float32 it is slower and less exact
            "fit": "off",
            "cache-ram": 0,  # no second copy of idle slots, which would survive an erased one
            "slot-save-path": folder,  # without it no slot can be erased; nothing is saved
        }
        flags = ["lora-init-without-apply", "no-kv-unified", "no-context-shift", "offline", "no-ui"]
        given = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        return [str(tree.server), *given, *(f"--{flag}" for flag in flags)]

    # Settings of the user's own server stay out of the measurement.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LLAMA_")}
    with running_server("llama-server", command, environment, START_TIMEOUT_S) as server:
        yield LlamaCppPlayer(
            server, list(adapters), cache_bytes_per_token, never=_parts_of_characters(model)
        )


def _parts_of_characters(model: Path) -> list[int]:
    """Ids of tokens whose text ends within a character. The server streams no id of such a token."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    texts = tokenizer.batch_decode([[token_id] for token_id in range(len(tokenizer))])
    return [token_id for token_id, text in enumerate(texts) if text.endswith("\ufffd")]


class LlamaCppPlayer(Peer):
    """A running llama-server whose slot and LoRA number i are those of agent i. It says no token of ``never``."""

    def __init__(
        self,
        server: LocalServer,
        agents: Sequence[str],
        cache_bytes_per_token: int,
        *,
        never: Sequence[int] = (),
    ) -> None:
        import psutil

        self._server = server
        self._usage = psutil.Process(server.process.pid)
        self._slots = {agent: slot for slot, agent in enumerate(agents)}
        self._cached = dict.fromkeys(agents, 0)  # tokens
        self._cache_bytes_per_token = cache_bytes_per_token
        self._never = [[token_id, False] for token_id in never]
        self._work = Work()

    def stream(self, agent: str, prompt_ids: Sequence[int], output_tokens: int) -> Iterator[int]:
        for event in self._events(agent, prompt_ids, output_tokens):
            yield from event["tokens"]

    def likely(self, agent: str, prompt_ids: Sequence[int], output_tokens: int) -> list[Likely]:
        events = self._events(agent, prompt_ids, output_tokens, n_probs=NUM_LIKELY)
        choices = [choice for event in events for choice in event["completion_probabilities"]]
        return [
            Likely(choice["id"], {top["id"]: top["logprob"] for top in choice["top_logprobs"]})
            for choice in choices
        ]

    def _events(
        self, agent: str, prompt_ids: Sequence[int], output_tokens: int, **more: Any
    ) -> Iterator[dict[str, Any]]:
        """What the server says while it generates. Raises TurnError and ServerError."""
        body = {
            "prompt": list(prompt_ids),
            "n_predict": output_tokens,
            "id_slot": self._slots[agent],
            "lora": [
                {"id": slot, "scale": float(name == agent)} for name, slot in self._slots.items()
            ],
            "cache_prompt": True,
            "samplers": ["top_k"],
            "top_k": 1,
            "ignore_eos": True,
            "logit_bias": self._never,
            "stream": True,
            "return_tokens": True,
            **more,
        }
        received, done = 0, None
        try:
            with post(self._server.port, "/completion", body) as response:
                for event in events(response):
                    if event.get("stop"):
                        done = event
                    else:
                        received += len(event["tokens"])
                        yield event
        except (OSError, http.client.HTTPException) as error:
            raise self._server.error(f"broke off a turn of {agent} ({error!r})") from error
        if done is None:
            raise self._server.error(f"broke off a turn of {agent} after {received} tokens")
        if received != output_tokens:
            raise TurnError(f"llama-server sent {received} tokens, asked for {output_tokens}")
        self._work = Work(prefilled=done["timings"]["prompt_n"])
        self._cached[agent] = done["tokens_cached"]

    def work(self) -> Work:
        return self._work

    def cache_bytes(self) -> CacheBytes:
        """By count: the tokens in all slots, times what a token takes. The server reserves more from the start."""
        held = sum(self._cached.values()) * self._cache_bytes_per_token
        return CacheBytes(peak=held, base=held, strips=0)

    def reset(self) -> None:
        for agent, slot in self._slots.items():
            with post(self._server.port, f"/slots/{slot}?action=erase", {}) as response:
                response.read()
            self._cached[agent] = 0

    def cpu_s(self) -> float:
        used = self._usage.cpu_times()
        return super().cpu_s() + float(used.user) + float(used.system)
