"""Keys in front of every path of vLLM's server. vLLM's own check covers a few prefixes and leaves the rest open.

Loaded by vLLM's flag `--middleware`, in the process of its HTTP server. Plain ASGI: needs no web framework.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from precache.access import (
    API_KEY_VARIABLE,
    CHALLENGE,
    KEY_NEEDED,
    OPEN_PATHS,
    bearer_key,
    check_key,
    is_one_of,
    split_keys,
)
from precache.errors import ConfigError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class KeyGuard:
    """ASGI middleware: every request but for ``/health`` needs one of the keys in PRECACHE_API_KEY.

    Raises ConfigError at the server's start when the variable holds no key, or one that is unusable.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._keys = split_keys(os.environ.get(API_KEY_VARIABLE, ""))
        if not self._keys:
            raise ConfigError(API_KEY_VARIABLE, "no key", "one key, or several with commas")
        for key in self._keys:
            check_key(API_KEY_VARIABLE, key)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._lets_in(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await _refuse(send)
        else:  # before the handshake: the client sees a 403
            await send({"type": "websocket.close", "code": 1008, "reason": KEY_NEEDED})

    def _lets_in(self, scope: Message) -> bool:
        is_open = scope["type"] == "http" and scope["path"] in OPEN_PATHS
        return is_open or is_one_of(bearer_key(scope["headers"]), self._keys)


async def _refuse(send: Send) -> None:
    """The embedded server's answer."""
    error = {
        "message": KEY_NEEDED,
        "type": "authentication_error",
        "param": None,
        "code": "invalid_api_key",
    }
    headers = {"Content-Type": "application/json", **CHALLENGE}
    await send(
        {
            "type": "http.response.start",
            "status": 401,
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        }
    )
    await send({"type": "http.response.body", "body": json.dumps({"error": error}).encode()})
