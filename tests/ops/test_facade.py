"""The public function: dispatch, defaults, and one contract for all backends."""

from __future__ import annotations

import importlib
import logging
import sys

import pytest
import torch

import precache
import precache.ops.cpu
import precache.ops.reference
from precache import ops
from precache.ops import available_backends, backends, lora_attention, native
from tests.ops.cases import Case


def skip_where_it_cannot_run(backend: str, dtype: torch.dtype = torch.float32) -> None:
    try:
        backends.choose_backend(backend, torch.device("cpu"), dtype)
    except ops.BackendUnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("backend", ["auto", *available_backends()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_output_contract(backend: str, dtype: torch.dtype) -> None:
    skip_where_it_cannot_run(backend, dtype)
    call = Case(q_len=5, kv_len=60, key_rank=2, dtype=dtype).inputs()._asdict()
    got = lora_attention(**call, backend=backend)
    assert got.out.shape == call["q"].shape
    assert got.out.dtype == dtype
    assert got.lse.shape == call["q"].shape[:2]
    assert got.lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("backend", available_backends())
def test_backends_agree_on_a_call_with_defaults(backend: str) -> None:
    skip_where_it_cannot_run(backend)
    inputs = Case(q_len=9, kv_len=60, rank=None).inputs()
    q, k, v_base = inputs[:3]
    got = lora_attention(
        q, k, v_base, scale=inputs.scale, q_positions=inputs.q_positions, backend=backend
    )
    expected = lora_attention(**inputs._asdict(), backend="reference")
    torch.testing.assert_close(got.out, expected.out, atol=1e-5, rtol=1e-5)


def test_position_as_int_or_tensor_is_the_same() -> None:
    call = Case(q_len=9, kv_len=60).inputs()._asdict()
    by_int = lora_attention(**call)
    by_tensor = lora_attention(**(call | {"q_positions": torch.arange(51, 60)}))
    torch.testing.assert_close(by_int.out, by_tensor.out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(by_int.lse, by_tensor.lse, atol=1e-5, rtol=1e-5)


def test_auto_says_once_what_it_chose(caplog: pytest.LogCaptureFixture) -> None:
    backends.choose_backend.cache_clear()
    backends.load_backend.cache_clear()
    with caplog.at_level(logging.INFO, logger="precache.ops"):
        for _ in range(3):
            lora_attention(**Case().inputs()._asdict())
    fastest = "cpu" if native.obstacle(torch.device("cpu"), torch.float32) else "native"
    assert [record.message.split(",")[0] for record in caplog.records] == [
        f"attention backend {fastest!r}"
    ]


def test_backends_are_imported_when_first_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("precache.ops")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(precache, "ops", ops)  # the import below replaces it
    fresh = importlib.import_module("precache.ops")
    assert not {"precache.ops.cpu", "precache.ops.reference"} & sys.modules.keys()
    fresh.lora_attention(**Case().inputs()._asdict(), backend="cpu")
    assert "precache.ops.cpu" in sys.modules
    assert "precache.ops.reference" not in sys.modules


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    choose = backends.choose_backend.__wrapped__
    with pytest.raises(ops.BackendUnavailableError, match=r'pip install "precache\[triton\]"'):
        choose("triton", torch.device("cuda"), torch.float32)
    assert choose("auto", torch.device("cuda"), torch.float32) == "cpu"
