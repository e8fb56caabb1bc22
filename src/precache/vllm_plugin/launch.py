"""The command that starts vLLM's own server with what the plugin needs. Imports no vLLM."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from precache.adapters.tensors import parse_name
from precache.adapters.weights import read_folder
from precache.errors import AdapterFormatError, ConfigError, PolicyNotAllowedError
from precache.vllm_plugin.settings import CONFIG_KEY, find_policy

SERVER_MODULE = "vllm.entrypoints.openai.api_server"
BLOCK_SIZE = (
    32  # the smallest that vLLM's CPU attention takes; the tail of a turn below it is never shared
)
GUARD = "precache.vllm_plugin.guard.KeyGuard"
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM takes as --max-lora-rank


@dataclass(frozen=True)
class Launch:
    """What to serve. None leaves the choice to vLLM; ``extra`` are further flags of vLLM's server, and they win.

    ``guarded``: every path but ``/health`` asks for a key of PRECACHE_API_KEY, which has to be in its environment.
    """

    model: str
    adapters: Mapping[str, Path]
    policy: str | None = "prelrshared"  # None: vLLM as it is
    served_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    dtype: str | None = None
    max_model_len: int | None = None
    cache_bytes: int | None = None
    guarded: bool = False
    extra: Sequence[str] = field(default_factory=tuple)


def vllm_command(launch: Launch) -> list[str]:
    """The program and its arguments. Raises PrecacheError for adapters or policies that cannot be served."""
    strips = launch.policy is not None and find_policy(launch.policy).strips
    if not launch.adapters:
        raise ConfigError("--adapter", "none", "at least one NAME=FOLDER with --engine vllm")
    rank = 0
    targets: set[str] = set()
    for name, path in launch.adapters.items():
        own_rank, own_targets = _shape_of(path)
        if strips and "k_proj" in own_targets:
            raise PolicyNotAllowedError(
                str(launch.policy),
                f"adapter {name!r} has LoRA on k_proj, and the vLLM plugin shares keys as they are",
            )
        rank, targets = max(rank, own_rank), targets | own_targets
    if strips:
        targets |= {"q_proj", "v_proj"}  # the layer that computes strips replaces their projection
    return [sys.executable, "-m", SERVER_MODULE, *_arguments(launch, rank, sorted(targets))]


def _arguments(launch: Launch, rank: int, targets: Sequence[str]) -> list[str]:
    optional = {
        "--served-model-name": launch.served_name,
        "--dtype": launch.dtype,
        "--max-model-len": launch.max_model_len,
        "--kv-cache-memory-bytes": launch.cache_bytes,
    }
    return [
        *("--model", launch.model, "--host", launch.host, "--port", str(launch.port)),
        *(part for flag, value in optional.items() if value for part in (flag, str(value))),
        *("--enable-lora", "--max-loras", str(len(launch.adapters))),
        *("--max-lora-rank", str(_allowed_rank(rank)), "--lora-target-modules", *targets),
        *("--lora-modules", *(f"{name}={path}" for name, path in launch.adapters.items())),
        *("--block-size", str(BLOCK_SIZE), "--enable-prefix-caching"),
        "--enable-prompt-tokens-details",
        *_ask_for(launch.policy),
        *launch.extra,
        *(("--middleware", GUARD) if launch.guarded else ()),  # last: around those of extra
    ]


def _ask_for(policy: str | None) -> list[str]:
    if policy is None:
        return []
    return ["--additional-config", json.dumps({CONFIG_KEY: {"policy": policy}})]


def _shape_of(path: Path) -> tuple[int, set[str]]:
    """The largest rank in an adapter folder, and the projections it adapts."""
    folder, _, tensors = read_folder(path)
    keys = {name: key for name in tensors if (key := parse_name(name)) is not None}
    if not keys:
        raise AdapterFormatError(f"adapter {folder}: the weights file holds no LoRA tensor")
    rank = max(tensors[name].shape[0] for name, key in keys.items() if key.side == "A")
    return rank, {key.target for key in keys.values()}


def _allowed_rank(rank: int) -> int:
    for allowed in LORA_RANKS:
        if rank <= allowed:
            return allowed
    raise ConfigError("LoRA rank", rank, f"up to {LORA_RANKS[-1]}, which is vLLM's limit")
