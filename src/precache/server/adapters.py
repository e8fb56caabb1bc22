"""What an admin may change, under vLLM's names: adapters come and go, the cache is emptied."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from precache.adapters.bank import BASE_NAME
from precache.server.errors import ApiError, ModelNotFoundError
from precache.server.protocol import LoadAdapterRequest, UnloadAdapterRequest
from precache.server.service import Service

_log = logging.getLogger(__name__)


def adapters_router(service: Service) -> APIRouter:
    """The admin routes over one service."""
    router = APIRouter()

    @router.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
    async def load_lora_adapter(body: LoadAdapterRequest) -> str:
        path = contained_path(service.settings.adapter_root, body.lora_path)
        await asyncio.to_thread(_load, service, body, path)
        _log.info("adapter %r loaded from %s", body.lora_name, path)
        return f"Success: LoRA adapter '{body.lora_name}' added successfully."

    @router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
    async def unload_lora_adapter(body: UnloadAdapterRequest) -> str:
        if body.lora_name not in service.models[1:]:
            raise ModelNotFoundError(body.lora_name, service.models)
        await asyncio.to_thread(service.engine.remove_adapter, body.lora_name)
        _log.info("adapter %r unloaded", body.lora_name)
        return f"Success: LoRA adapter '{body.lora_name}' removed successfully."

    @router.post("/reset_prefix_cache", response_class=PlainTextResponse)
    async def reset_prefix_cache() -> str:
        await asyncio.to_thread(service.engine.reset)
        _log.info("cache emptied")
        return "Success: the cache is empty."

    return router


def contained_path(root: Path | None, asked: str) -> Path:
    """The folder ``asked`` (relative to ``root``, or absolute) if it lies under ``root``, links followed.

    Raises ApiError; it does not tell what exists elsewhere.
    """
    if root is None:
        raise ApiError(
            403, "adapters cannot be loaded: the server was started without --adapter-root"
        )
    try:
        path, base = (root / asked).resolve(), root.resolve()
        is_folder = path.is_dir()
    except (OSError, ValueError, RuntimeError):
        raise ApiError(400, "lora_path: not a path", param="lora_path") from None
    if path == base or not path.is_relative_to(base):
        raise ApiError(400, f"lora_path: allowed are folders under {base}", param="lora_path")
    if not is_folder:
        raise ApiError(400, f"lora_path: there is no folder {path}", param="lora_path")
    return path


def _load(service: Service, body: LoadAdapterRequest, path: Path) -> None:
    engine, name = service.engine, body.lora_name
    if name in (BASE_NAME, service.settings.base_name):
        raise ApiError(400, f"lora_name: {name!r} is the base model", param="lora_name")
    if body.load_inplace and name in engine.agents():
        engine.replace_adapter(name, path)
    else:
        engine.add_adapter(name, path)
