"""O15: adapters come and go at run time; a bad one changes nothing and disturbs nobody."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.server.conftest import Serve
from tests.server.live import LiveServer

ADMIN_KEY = "an-admin-key"


@pytest.fixture
def admin(serve: Serve, adapter_root: Path, tmp_path: Path) -> Iterator[LiveServer]:
    root = tmp_path / "root"
    shutil.copytree(adapter_root, root)
    weights = root / "truncated" / "adapter_model.safetensors"
    shutil.copytree(adapter_root / "critic", weights.parent)
    weights.write_bytes(weights.read_bytes()[:-100])
    (root / "link").symlink_to(adapter_root / "critic")
    with serve({"admin_key": ADMIN_KEY, "adapter_root": root}) as live:
        yield live


def send(server: LiveServer, action: str, **body: object) -> httpx.Response:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    return server.http.post(f"/v1/{action}_lora_adapter", json=body, headers=headers)


def names(server: LiveServer) -> list[str]:
    return [model.id for model in server.client.models.list()]


def test_an_adapter_comes_and_goes(admin: LiveServer) -> None:
    response = send(admin, "load", lora_name="critic", lora_path="critic")
    assert response.status_code == 200
    assert response.text == "Success: LoRA adapter 'critic' added successfully."
    assert "critic" in names(admin)
    assert admin.complete("critic").model == "critic"
    response = send(admin, "unload", lora_name="critic")
    assert response.text == "Success: LoRA adapter 'critic' removed successfully."
    assert "critic" not in names(admin)
    assert admin.error("/v1/completions", model="critic", prompt="a")["status"] == 404
    assert send(admin, "unload", lora_name="critic").status_code == 404


def test_a_name_is_replaced_only_when_asked_to(admin: LiveServer) -> None:
    before = admin.complete(logprobs=0).choices[0].logprobs.token_logprobs
    body = {"lora_name": "plan", "lora_path": "critic"}
    refused = send(admin, "load", **body)
    assert refused.status_code == 400
    assert "load_inplace" in refused.json()["error"]["message"]
    assert admin.complete(logprobs=0).choices[0].logprobs.token_logprobs == pytest.approx(
        before, abs=1e-4
    )
    assert send(admin, "load", **body, load_inplace=True).status_code == 200
    answer = admin.complete(logprobs=0)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0  # old weights wrote it
    assert answer.choices[0].logprobs.token_logprobs != pytest.approx(before, abs=1e-2)


def test_a_bad_adapter_disturbs_nobody(admin: LiveServer) -> None:
    before, expected = names(admin), admin.complete(max_tokens=20).choices[0].text
    with ThreadPoolExecutor(5) as pool, admin.engine.slow(0.01):
        running = [pool.submit(admin.complete, max_tokens=20) for _ in range(4)]
        response = pool.submit(send, admin, "load", lora_name="bad", lora_path="truncated").result()
        texts = [turn.result().choices[0].text for turn in running]
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "adapter_refused"
    assert texts == [expected] * 4
    assert names(admin) == before


@pytest.mark.parametrize(
    "path",
    ["..", ".", "../model", "/etc", "link", "a\0b", "x" * 4000, "nothing", "plan/../../model"],
)
def test_paths_outside_the_root_are_refused(admin: LiveServer, path: str) -> None:
    response = send(admin, "load", lora_name="new", lora_path=path)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "lora_path"


@pytest.mark.parametrize("name", ["base", "tiny", "", "a b", "x" * 200, "<script>"])
def test_names_that_no_adapter_may_have(admin: LiveServer, name: str) -> None:
    response = send(admin, "load", lora_name=name, lora_path="critic")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "lora_name"


def test_an_adapter_that_is_loaded_later_reads_what_is_cached(admin: LiveServer) -> None:
    admin.complete("plan", "a longer history of others")
    send(admin, "load", lora_name="critic", lora_path="critic")
    warm = admin.complete("critic", "a longer history of others")
    assert warm.usage.prompt_tokens_details.shared_tokens > 0


def test_the_cache_can_be_emptied(admin: LiveServer) -> None:
    admin.complete("plan", "a history")
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    assert admin.http.post("/reset_prefix_cache", headers=headers).status_code == 200
    assert admin.http.get("/v1/sessions").json()["sessions"] == []
