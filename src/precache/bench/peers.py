"""The rows of `bench turns` that are not the engine's, loaded and ready to play."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from precache import Engine
from precache.bench.llama_cpp import LlamaCppTree, llama_cpp_player
from precache.bench.player import Peer
from precache.bench.stock import StockPlayer
from precache.bench.summary import LLAMA_CPP, STOCK
from precache.cache.layout import CacheLayout
from precache.errors import ConfigError


@contextmanager
def ready_peers(
    wanted: Collection[str],
    engine: Engine,
    model: str,
    adapters: Mapping[str, Path],
    *,
    llama_cpp: LlamaCppTree | None,
    context: int,
    folder: Path,
) -> Iterator[dict[str, Peer]]:
    """The wanted peers by row, with the engine's dtype and device; they end with the block.

    ``context`` is the length of the longest trace; files are written into ``folder``. Raises PrecacheError.
    """
    peers: dict[str, Peer] = {}
    dtype, device = engine.model.dtype, engine.model.device
    with ExitStack() as stack:
        if STOCK in wanted:
            peers[STOCK] = StockPlayer(model, adapters, dtype=dtype, device=device)
        if llama_cpp is not None:
            if device.type != "cpu":
                raise ConfigError("--device", str(device), "cpu, with --llama-cpp")
            shape = engine.model.shape
            layout = CacheLayout(
                shape.num_layers, shape.num_kv_heads, shape.head_dim, dtype, device
            )
            player = llama_cpp_player(
                llama_cpp,
                Path(model),
                adapters,
                folder,
                dtype=dtype,
                context=context,
                threads=torch.get_num_threads(),
                cache_bytes_per_token=layout.base_bytes_per_token,
            )
            peers[LLAMA_CPP] = stack.enter_context(player)
        yield peers
