"""What the server says about itself: models, health, metrics, and what is cached."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from precache.engine.sessions import SessionInfo
from precache.server.answers import ModelCard, ModelList
from precache.server.errors import ModelNotFoundError
from precache.server.metrics import bytes_by_part
from precache.server.service import Service

_METRICS_PATIENCE_S = 2.0
_LIVE_PATIENCE_S = 0.25
_SESSIONS_PATIENCE_S = 30.0


def status_router(service: Service) -> APIRouter:
    """The routes over one service."""
    router = APIRouter()
    started = int(time.time())

    def card(name: str) -> ModelCard:
        base = service.settings.base_name
        return ModelCard(
            id=name,
            created=started,
            root=base,
            parent=None if name == base else base,
            max_model_len=service.engine.context_window,
        )

    @router.get("/health", response_class=PlainTextResponse)
    async def health() -> str:
        return "ok"

    @router.get("/v1/models")
    async def models() -> ModelList:
        return ModelList(data=[card(name) for name in service.models])

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> ModelCard:
        if name not in service.models:
            raise ModelNotFoundError(name, service.models)
        return card(name)

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        await service.monitor.snapshot(_METRICS_PATIENCE_S)
        return Response(service.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/v1/sessions")
    async def sessions() -> dict[str, Any]:
        return await _cache_state(service, _SESSIONS_PATIENCE_S)

    @router.get("/v1/live")
    async def live(after: Annotated[int, Query(ge=0, le=2**53)] = 0) -> dict[str, Any]:
        """What the page shows; ``after`` is the number of the last turn that it has seen finished."""
        monitor, queue = service.monitor, service.queue
        return {
            **await _cache_state(service, _LIVE_PATIENCE_S),
            "models": service.models,
            "policy": service.engine.policy.name,
            "schedule": service.engine.policy.schedule,
            "context_window": service.engine.context_window,
            "running": int(queue.running is not None),
            "waiting": queue.waiting,
            "turns": monitor.turns(after),
            "hints": monitor.hints(),
        }

    return router


async def _cache_state(service: Service, patience_s: float) -> dict[str, Any]:
    snapshot = await service.monitor.snapshot(patience_s)
    stats = asdict(snapshot.stats)
    return {
        "as_of": snapshot.taken,
        "stats": stats,
        "parts": bytes_by_part(snapshot.sessions),
        "sessions": [_session(session) for session in snapshot.sessions],
    }


def _session(session: SessionInfo) -> dict[str, Any]:
    """A session without its tokens: who wrote what, which strips cover it, its bytes."""
    return {
        "session_id": session.session_id,
        "namespace": session.namespace,
        "length": session.length,
        "writers": [
            {"start": run.start, "end": run.end, "name": run.writer.name} for run in session.writers
        ],
        "strips": [
            {
                "kind": strip.kind,
                "readers": strip.readers,
                "covered": strip.covered,
                "bytes": strip.bytes,
            }
            for strip in session.strips
        ],
        "pending_tokens": session.pending_tokens,
        "base_bytes": session.base_bytes,
        "bytes": session.bytes,
        "busy": session.busy,
    }
