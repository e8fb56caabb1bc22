"""Who may do what. Every path needs a key but ``/health``; what changes the server needs the admin key.

This is a layer around the whole app, not something that routes ask for: a route that is added later is closed too.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from precache.access import CHALLENGE, KEY_NEEDED, OPEN_PATHS, bearer_key, is_one_of
from precache.server.errors import REASON, ApiError
from precache.server.page import page_response
from precache.server.settings import ServerSettings

ADMIN_PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/reset_prefix_cache"})
PAGE_PATH = "/"


class KeyGuard:
    """ASGI middleware that lets through what the request's bearer key allows."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._admin_key = settings.admin_key
        self._api_keys = settings.api_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # there are no websockets here
            return
        refusal = self._refusal(scope["path"], bearer_key(scope["headers"]))
        if refusal is None:
            await self._app(scope, receive, send)
        elif scope["path"] == PAGE_PATH and scope["method"] == "GET":
            # The page holds no data. It comes with the refusal, so that a person can type the key into it.
            scope[REASON] = refusal.code
            await page_response(refusal.status, refusal.headers)(scope, receive, send)
        else:
            await refusal.response(scope)(scope, receive, send)

    def _refusal(self, path: str, key: str) -> ApiError | None:
        is_admin = is_one_of(key, [] if self._admin_key is None else [self._admin_key])
        if path in ADMIN_PATHS:
            return None if is_admin else self._no_admin(key)
        if not self._api_keys or is_admin or is_one_of(key, self._api_keys):
            return None
        return ApiError(
            401,
            KEY_NEEDED,
            code="invalid_api_key",
            headers=CHALLENGE,
        )

    def _no_admin(self, key: str) -> ApiError:
        if self._admin_key is None:
            text = "this needs an admin key, and the server was started without --admin-key"
            return ApiError(403, text, code="admin_disabled")
        if is_one_of(key, self._api_keys):
            return ApiError(403, "this needs the admin key", code="admin_key_needed")
        return ApiError(
            401, "a valid admin key is needed", code="invalid_api_key", headers=CHALLENGE
        )
