"""The row to beat: transformers and PEFT the way users write multi-agent loops today, without precache.

One PeftModel with all adapters, ``set_adapter`` before each turn, one DynamicCache per agent that is extended with
everything since the agent's own last turn, SDPA, and logits of the last token only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from precache.bench.player import CacheBytes, Likely, Peer, Work

NUM_LIKELY = 20  # tokens that are compared at every output token


class StockPlayer(Peer):
    """Stock transformers + PEFT. Needs no engine and shares nothing with one."""

    def __init__(
        self,
        model: str,
        adapters: Mapping[str, Path],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        from peft import PeftModel

        base = AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, attn_implementation="sdpa", use_safetensors=True
        )
        (first, path), *others = adapters.items()
        self._model: Any = PeftModel.from_pretrained(base, str(path), adapter_name=first)
        for name, path in others:
            self._model.load_adapter(str(path), adapter_name=name)
        self._model.to(device).eval()
        self._device = device
        self._caches: dict[str, DynamicCache] = {}
        self._work = Work()

    def stream(self, agent: str, prompt_ids: Sequence[int], output_tokens: int) -> Iterator[int]:
        for logits in self._steps(agent, prompt_ids, output_tokens):
            yield int(logits.argmax())

    def likely(self, agent: str, prompt_ids: Sequence[int], output_tokens: int) -> list[Likely]:
        logits = self.logits(agent, prompt_ids, output_tokens)
        values, tokens = logits.log_softmax(-1).topk(min(NUM_LIKELY, logits.shape[-1]))
        rows = zip(tokens.tolist(), values.tolist(), strict=True)
        return [Likely(ids[0], dict(zip(ids, row, strict=True))) for ids, row in rows]

    def logits(self, agent: str, prompt_ids: Sequence[int], output_tokens: int) -> Tensor:
        """Run one greedy turn and return the logits of every output token, [output_tokens, vocab] fp32."""
        return torch.stack(list(self._steps(agent, prompt_ids, output_tokens)))

    @torch.inference_mode()
    def _steps(self, agent: str, prompt_ids: Sequence[int], output_tokens: int) -> Iterator[Tensor]:
        self._model.set_adapter(agent)
        cache = self._caches.setdefault(agent, DynamicCache(config=self._model.config))
        tokens = list(prompt_ids[cache.get_seq_length() :])
        self._work = Work(prefilled=len(tokens))
        for _ in range(output_tokens):
            output = self._model(
                input_ids=torch.tensor([tokens], device=self._device),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            logits: Tensor = output.logits[0, -1].float()
            tokens = [int(logits.argmax())]
            yield logits

    def work(self) -> Work:
        return self._work

    def cache_bytes(self) -> CacheBytes:
        """Bytes of all agents' caches. They only grow, so this is the most that was held at the end of a step."""
        layers = [layer for cache in self._caches.values() for layer in cache.layers]
        tensors = [
            (getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in layers
        ]
        held = sum(tensor.nbytes for pair in tensors for tensor in pair if tensor is not None)
        return CacheBytes(peak=held, base=held, strips=0)

    def reset(self) -> None:
        self._caches.clear()
