"""Puts the app together: routes over one service, and the layers around them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.trustedhost import TrustedHostMiddleware
from fastapi.responses import HTMLResponse

from precache import __version__
from precache.engine.engine import Engine
from precache.server.adapters import adapters_router
from precache.server.answers import ErrorAnswer
from precache.server.auth import KeyGuard
from precache.server.chat_completions import chat_router
from precache.server.completions import completions_router
from precache.server.counting import ErrorCounter
from precache.server.errors import install_error_handlers
from precache.server.page import page_response
from precache.server.service import Service
from precache.server.settings import ServerSettings
from precache.server.status import status_router

_log = logging.getLogger(__name__)

_LOCAL_NAMES = ["localhost", "127.0.0.1", "[::1]"]
_ERRORS: dict[int | str, dict[str, object]] = {
    status: {"model": ErrorAnswer} for status in (400, 401, 403, 404, 413, 500, 503, 504)
}


def build_app(engine: Engine, settings: ServerSettings) -> FastAPI:
    """The server over an engine, which it closes at its end. Raises ConfigError."""
    service = Service(engine, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(
        title="precache",
        version=__version__,
        summary="OpenAI-compatible; LoRA agents on one backbone share one KV cache",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        max_body_size=settings.max_body_bytes,
        responses=_ERRORS,
        redirect_slashes=False,
    )
    app.state.service = service
    install_error_handlers(app)
    for router in (
        chat_router(service),
        completions_router(service),
        status_router(service),
        adapters_router(service),
    ):
        app.include_router(router)

    @app.get("/", response_class=HTMLResponse)
    async def live_page() -> HTMLResponse:
        return page_response()

    app.add_middleware(KeyGuard, settings=settings)
    if not settings.api_keys:
        # Without keys a web page could reach the server through a name of its own that points to this machine.
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=_LOCAL_NAMES)
    app.add_middleware(ErrorCounter, metrics=service.metrics)
    return app
