"""The keys in front of vLLM's server, around a stand-in for it: an app that answers every path with its name."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.testclient import TestClient, WebSocketDenialResponse
from starlette.websockets import WebSocketDisconnect

from precache.errors import ConfigError
from precache.vllm_plugin.guard import KeyGuard

KEYS = ("first-key", "second-key")
PATHS = ("/v1/models", "/metrics", "/metrics/", "/tokenize", "/docs", "/health/", "//health", "/")


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await PlainTextResponse(scope["path"])(scope, receive, send)


async def talk(socket: Any) -> None:
    await socket.accept()
    await socket.send_text("hello")
    await socket.close()


def guarded() -> TestClient:
    routes = [
        Route("/health", lambda _: PlainTextResponse("/health")),
        WebSocketRoute("/v1/realtime", talk),
        WebSocketRoute("/health", talk),
        Mount("/", answer),
    ]
    return TestClient(KeyGuard(Starlette(routes=routes)))  # type: ignore[arg-type]


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> TestClient:
    monkeypatch.setenv("PRECACHE_API_KEY", ",".join(KEYS))
    return guarded()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("path", PATHS)
def test_every_path_but_health_needs_a_key(client: TestClient, path: str) -> None:
    for headers in ({}, bearer("wrong"), bearer(""), bearer(KEYS[0][:-1]), {"X-API-Key": KEYS[0]}):
        for method in ("GET", "POST", "OPTIONS"):
            refused = client.request(method, path, headers=headers)
            assert refused.status_code == 401
            assert refused.headers["WWW-Authenticate"] == "Bearer"
            assert refused.json()["error"]["code"] == "invalid_api_key"
    for key in KEYS:
        assert client.get(path, headers=bearer(key)).status_code == 200


def test_health_is_open(client: TestClient) -> None:
    assert client.get("/health").text == "/health"


@pytest.mark.parametrize("path", ["/v1/realtime", "/health"])
def test_a_websocket_needs_a_key_too(client: TestClient, path: str) -> None:
    with pytest.raises((WebSocketDisconnect, WebSocketDenialResponse)):
        client.websocket_connect(path).__enter__()
    with client.websocket_connect(path, headers=bearer(KEYS[0])) as socket:
        assert socket.receive_text() == "hello"


def test_the_server_starts_and_stops_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRECACHE_API_KEY", KEYS[0])
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        seen.append(scope["type"])

    async def nothing(_: Any = None) -> Any:
        return {}

    asyncio.run(KeyGuard(app)({"type": "lifespan"}, nothing, nothing))
    assert seen == ["lifespan"]


@pytest.mark.parametrize("value", [None, "", ",", "short", "good-enough-key,short"])
def test_a_server_without_usable_keys_does_not_start(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("PRECACHE_API_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("PRECACHE_API_KEY", value)
    with pytest.raises(ConfigError, match="PRECACHE_API_KEY"):
        guarded()
