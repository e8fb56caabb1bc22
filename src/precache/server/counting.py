"""Counts the answers that are errors, by status and reason: the refused and the late never become turns.

The outermost layer of the app. Who makes an error answer leaves its reason in the request's scope.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from precache.server.errors import REASON
from precache.server.metrics import Metrics


class ErrorCounter:
    """ASGI middleware. Reasons are the codes and kinds of ApiError, so there is a bounded number of them."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answered = False

        async def counted(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                answered = True
                if message["status"] >= 400:
                    self._metrics.error_answered(message["status"], scope.get(REASON, "other"))
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except Exception:
            if not answered:  # the answer comes from the framework's own layer, around this one
                self._metrics.error_answered(500, "internal")
            raise
