"""O25: closed by default, bounded in every number, and harmless requests still work afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from precache.errors import ConfigError
from precache.server import ServerSettings
from tests.server.conftest import Serve
from tests.server.live import LiveServer

API_KEY, ADMIN_KEY = "an-api-key", "an-admin-key"


@pytest.fixture(scope="module")
def locked(serve: Serve, adapter_root: Path) -> Iterator[LiveServer]:
    settings = {
        "api_keys": (API_KEY, "a-second-key"),
        "admin_key": ADMIN_KEY,
        "adapter_root": adapter_root,
    }
    with serve(settings) as live:
        yield live


def with_key(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def paths(server: LiveServer) -> list[tuple[str, str]]:
    schema = server.app.openapi()["paths"]
    found = [(method.upper(), path) for path, item in schema.items() for method in item]
    found += [
        (m, r.path) for r in server.app.routes if isinstance(r, Route) for m in r.methods or ()
    ]
    return sorted(
        {
            (method, path.replace("{name}", "plan").replace("{name:path}", "plan"))
            for method, path in found
        }
    )


def test_every_route_but_health_needs_a_key(locked: LiveServer) -> None:
    assert len(paths(locked)) >= 11
    for method, path in [
        *paths(locked),
        ("GET", "/nowhere"),
        ("GET", "/v1/models/"),
        ("GET", "//health"),
    ]:
        for headers in (
            {},
            with_key("wrong"),
            {"Authorization": "Bearer"},
            {"Authorization": f"Basic {API_KEY}"},
        ):
            response = locked.http.request(method, path, headers=headers)
            assert response.status_code == (
                200 if path == "/health" and method != "HEAD" else 401
            ), (method, path)


@pytest.mark.parametrize("key", [API_KEY, "a-second-key", ADMIN_KEY])
def test_a_key_opens_the_api(locked: LiveServer, key: str) -> None:
    assert locked.http.get("/v1/models", headers=with_key(key)).status_code == 200
    assert locked.http.get("/", headers=with_key(key)).status_code == 200


def test_an_api_key_does_not_load_adapters(locked: LiveServer) -> None:
    body = {"lora_name": "critic", "lora_path": "critic"}
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/reset_prefix_cache"):
        response = locked.http.post(path, json=body, headers=with_key(API_KEY))
        assert response.status_code == 403


def test_without_an_admin_key_nobody_loads_adapters(server: LiveServer) -> None:
    error = server.error("/v1/load_lora_adapter", lora_name="critic", lora_path="critic")
    assert error["status"] == 403
    assert "--admin-key" in error["message"]


def test_the_page_without_a_key_holds_no_data(locked: LiveServer) -> None:
    response = locked.http.get("/")
    assert response.status_code == 401
    assert response.headers["content-type"].startswith("text/html")
    assert "plan" not in response.text.replace("explan", "")


def test_an_open_server_is_local_only() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(ConfigError, match="API key"):
            ServerSettings(base_name="tiny", host=host)
        assert ServerSettings(base_name="tiny", host=host, api_keys=(API_KEY,)).host == host


def test_an_open_server_answers_to_local_names_only(server: LiveServer) -> None:
    assert server.http.get("/v1/models", headers={"Host": "rebound.example"}).status_code == 400
    assert server.http.get("/v1/models", headers={"Host": "localhost:1"}).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 5_000_000),
        ("n", 0),
        ("logprobs", 10**9),
        ("max_tokens", 0),
        ("max_tokens", 10**30),
        ("max_tokens", True),
        ("temperature", -1),
        ("temperature", 10**400),
        ("temperature", "1"),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("top_k", 10**9),
        ("min_p", 2),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("seed", 2**63),
        ("stop", ["x"] * 17),
        ("stop", ["x" * 300]),
        ("stop", [""]),
        ("stop", [1]),
        ("logit_bias", {"99999999": 1}),
        ("logit_bias", {"5": 101}),
        ("prompt", [99999999]),
        ("prompt", [-1]),
        ("prompt", []),
        ("prompt", ""),
        ("prompt", [["a"]]),
        ("prompt", ["a"] * 65),
        ("stream_options", {"include_usage": True}),
    ],
)
def test_numbers_out_of_bounds_are_refused(server: LiveServer, field: str, value: object) -> None:
    body: dict[str, Any] = {"model": "plan", "prompt": "abc", "max_tokens": 1, field: value}
    turns = server.service.monitor.turns()
    error = server.error("/v1/completions", **body)
    assert error["status"] == 400
    assert server.service.monitor.turns() == turns  # refused before the engine sees it
    assert server.complete(max_tokens=1).usage.completion_tokens == 1


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"logprobs": True, "top_logprobs": 10**9}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 10**30}, "context length"),
        ({"n": 17}, "n: "),
    ],
)
def test_numbers_of_a_chat_out_of_bounds_are_refused(
    server: LiveServer, fields: dict[str, object], named: str
) -> None:
    messages = [{"role": "user", "content": "a"}]
    error = server.error("/v1/chat/completions", model="plan", messages=messages, **fields)
    assert error["status"] == 400
    assert error["message"].startswith(named)


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "plan", "prompt": "a", "temperature": NaN}',
        b'{"model": "plan", "prompt": "a", "temperature": Infinity}',
        b'{"model": "plan", "prompt": "\\ud800"}',
        b'{"model": "\\ud800", "prompt": "a"}',
        b'{"model": "plan", "\\ud800": "a"}',
        b'{"model": "plan", "prompt": "\xff"}',
        b'{"model": "plan", "prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"{",
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_bodies_that_are_none_are_refused(server: LiveServer, path: str, body: bytes) -> None:
    response = server.http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_a_body_that_is_too_large_is_refused(server: LiveServer) -> None:
    body = {"model": "plan", "prompt": "a" * (5 * 2**20)}
    assert server.post("/v1/completions", **body).status_code == 413


def test_a_form_of_another_site_is_refused(server: LiveServer) -> None:
    body = b'{"model": "plan", "prompt": "abc"}'
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        response = server.http.post("/v1/completions", content=body, headers={"Content-Type": kind})
        assert response.status_code == 400


def test_unknown_paths_and_methods_have_the_same_shape(server: LiveServer) -> None:
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)):
        response = server.http.request(method, path)
        assert response.status_code == status
        assert "error" in response.json()


def test_health_is_open(locked: LiveServer) -> None:
    assert httpx.get(f"{locked.url}/health").text == "ok"
