"""Runs the app under uvicorn, and ends it cleanly: a signal is an ordinary end, with exit status 0."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI

from precache.server.service import Service
from precache.server.settings import ServerSettings

_log = logging.getLogger(__name__)
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LAST_WORDS_S = 5.0  # for error events to reach their clients, after the grace


class GracefulServer(uvicorn.Server):
    """On the first signal nothing new is taken, and what runs may end; on the second it is cut short."""

    def __init__(
        self, config: uvicorn.Config, service: Service, on_ready: Callable[[str], None]
    ) -> None:
        super().__init__(config)
        self._service = service
        self._on_ready = on_ready
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while serving, and do not raise them again at the end."""
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        first, self.should_exit = not self.should_exit, True
        if self._loop is not None:
            end = self._service.begin_shutdown if first else self._service.queue.abort
            self._loop.call_soon_threadsafe(end)
        _log.info("signal %d: %s", sig, "no new requests" if first else "ending what runs")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._on_ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")


def run_app(app: FastAPI, settings: ServerSettings, on_ready: Callable[[str], None]) -> None:
    """Serve until a signal comes. ``on_ready`` is called with the address once the port is open."""
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=round(settings.shutdown_grace_s + _LAST_WORDS_S),
    )
    GracefulServer(config, app.state.service, on_ready).run()
