"""Broken files, other base models, and values that are not finite: a precise error each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from precache.adapters import load_adapter
from precache.adapters.spec import MAX_CONFIG_BYTES
from precache.errors import (
    AdapterFormatError,
    AdapterShapeError,
    NonFiniteAdapterError,
    UnsupportedAdapterError,
)
from tests.adapters.folders import (
    SHAPE,
    edit_config,
    edit_tensors,
    tensor_name,
    tiny_model,
    write_adapter,
)

Q0_A, V1_B = tensor_name(0, "q_proj", "A"), tensor_name(1, "v_proj", "B")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> object:
    return load_adapter(folder, SHAPE, dtype=dtype, device="cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "a")


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1], ids=str)
def test_truncated_weights(folder: Path, keep: float) -> None:
    path = folder / "adapter_model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(AdapterFormatError, match="adapter_model.safetensors are unreadable"):
        load(folder)


def test_missing_files(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterFormatError, match="no such path"):
        load(tmp_path / "nowhere")
    with pytest.raises(AdapterFormatError, match="got a file, allowed is a PEFT LoRA folder"):
        load(folder / "adapter_config.json")
    with pytest.raises(AdapterFormatError, match="unreadable"):
        load(tmp_path / ("x" * 5000))
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterFormatError, match="no file adapter_model.safetensors"):
        load(folder)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(AdapterFormatError, match="no file adapter_config.json"):
        load(folder)


def test_pickle_is_refused_by_name_and_never_opened(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(AdapterFormatError, match=r"got adapter_model\.bin, a pickle file"):
        load(folder)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b"", "unreadable"),
        (b"{", "unreadable"),
        (b"\xff\xfe", "unreadable"),
        (b"[" * 100_000, "unreadable"),
        (b"[1]", "got a JSON list"),
        (b"null", "got a JSON NoneType"),
        (b" " * (MAX_CONFIG_BYTES + 1), f"got {MAX_CONFIG_BYTES + 1} bytes"),
    ],
    ids=["empty", "cut", "binary", "deep", "list", "null", "large"],
)
def test_configs_that_are_no_object(folder: Path, text: bytes, named: str) -> None:
    (folder / "adapter_config.json").write_bytes(text)
    with pytest.raises(AdapterFormatError, match=named):
        load(folder)


def test_an_empty_config_is_no_lora(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedAdapterError, match="peft_type: got None, allowed is 'LORA'"):
        load(folder)


def test_weights_above_the_limit_are_not_read(folder: Path) -> None:
    size = (folder / "adapter_model.safetensors").stat().st_size
    with pytest.raises(AdapterFormatError, match=f"got {size} bytes, allowed are 1000"):
        load_adapter(folder, SHAPE, dtype=torch.float32, device="cpu", max_bytes=1000)


def test_another_hidden_size_names_the_first_tensor_and_both_shapes(tmp_path: Path) -> None:
    # Fewer layers as well: the shape is the clearer reason of the two.
    folder = write_adapter(tmp_path / "a", model=tiny_model(hidden_size=32, num_hidden_layers=2))
    with pytest.raises(AdapterShapeError) as caught:
        load(folder)
    error = caught.value
    assert (error.tensor, error.got, error.allowed) == (Q0_A, (4, 32), (4, 64))
    assert f"tensor {Q0_A} has shape [4, 32], this model needs [4, 64]" in str(error)


def test_another_kv_width_is_found_in_b(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", model=tiny_model(num_key_value_heads=4))
    with pytest.raises(AdapterShapeError) as caught:
        load(folder)
    assert (caught.value.got, caught.value.allowed) == ((64, 4), (32, 4))


@pytest.mark.parametrize("shape", [(64,), (), (4, 64, 1)], ids=str)
def test_tensors_that_are_no_matrix(folder: Path, shape: tuple[int, ...]) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({Q0_A: torch.ones(shape)}))
    with pytest.raises(AdapterShapeError, match="q_proj.lora_A"):
        load(folder)


@pytest.mark.parametrize(("layers", "named"), [(5, "up to layer 4"), (2, "q_proj in layer 2")])
def test_another_number_of_layers(tmp_path: Path, layers: int, named: str) -> None:
    folder = write_adapter(tmp_path / "a", model=tiny_model(num_hidden_layers=layers))
    with pytest.raises(UnsupportedAdapterError, match=named):
        load(folder)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_number_names_its_tensor(folder: Path, bad: float) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[Q0_A][1, 5] = bad
        tensors[V1_B][0, 0] = bad

    edit_tensors(folder, spoil)
    with pytest.raises(NonFiniteAdapterError) as caught:
        load(folder)
    assert caught.value.tensors == [Q0_A, V1_B]


def test_overflow_in_the_dtype_of_the_model_is_found(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors[V1_B].fill_(60_000.0))  # times the scaling 2
    load(folder)
    with pytest.raises(NonFiniteAdapterError, match=r"v_proj.lora_B.weight \(as torch.float16\)"):
        load(folder, torch.float16)


@pytest.mark.parametrize(
    ("base", "warned"),
    [
        ("/old/place/x", True),
        ("org/other-llama", True),
        ("org/tiny-llama", False),
        ("/somewhere/else/Tiny-Llama/", False),
        (None, False),
        ("", False),
    ],
)
def test_another_base_name_is_a_warning_only(folder: Path, base: str | None, warned: bool) -> None:
    weights = load_adapter(
        edit_config(folder, base_model_name_or_path=base), SHAPE, dtype=torch.float32, device="cpu"
    )
    assert weights.modules
    assert bool(weights.warnings) == warned
    if warned:
        assert repr(base) in weights.warnings[0]
        assert "org/tiny-llama" in weights.warnings[0]


def test_defaults_of_absent_fields_are_pefts(folder: Path) -> None:
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    kept = {key: config[key] for key in ("peft_type", "target_modules", "rank_pattern")}
    path.write_text(json.dumps(kept | {"r": 4}))
    weights = load_adapter(folder, SHAPE, dtype=torch.float32, device="cpu")
    assert weights.modules[0, "q_proj"].scaling == 8 / 4
