"""Names, registration that is all or nothing, and the stacked A."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from precache.adapters import Adapter, AdapterBank, AdapterNameError
from precache.errors import (
    AdapterError,
    AdapterExistsError,
    AdapterFormatError,
    NonFiniteAdapterError,
    UnknownAdapterError,
    UnsupportedAdapterError,
)
from tests.adapters.folders import (
    QKVO,
    SHAPE,
    edit_config,
    edit_tensors,
    tensor_name,
    write_adapter,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        "plan": write_adapter(root / "plan", seed=1),
        "action": write_adapter(root / "action", seed=2, r=3),
        "keys": write_adapter(root / "keys", seed=3, target_modules=QKVO, layers_to_transform=[1]),
    }


@pytest.fixture
def bank() -> AdapterBank:
    return AdapterBank(SHAPE, dtype=torch.float32, device="cpu")


def _truncate(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _nan(folder: Path) -> None:
    name = tensor_name(0, "q_proj", "A")
    edit_tensors(folder, lambda tensors: tensors[name].view(-1)[:1].fill_(float("nan")))


BROKEN = [
    (_truncate, AdapterFormatError),
    (_nan, NonFiniteAdapterError),
    (lambda folder: edit_config(folder, use_dora=True), UnsupportedAdapterError),
]


def test_load_get_iterate_remove(bank: AdapterBank, folders: dict[str, Path]) -> None:
    plan = bank.load("plan", folders["plan"])
    action = bank.load("action", str(folders["action"]))
    assert bank.names == ("plan", "action")
    assert list(bank) == [plan, action]
    assert len(bank) == 2
    assert "plan" in bank
    assert bank.get("plan") is plan
    assert bank.remove("plan") is plan
    assert bank.names == ("action",)


@pytest.mark.parametrize("name", ["plann", " plan", "plan ", "Plan", "", "base"])
def test_unknown_names_are_refused_with_the_known_ones(
    bank: AdapterBank, folders: dict[str, Path], name: str
) -> None:
    bank.load("plan", folders["plan"])
    for call in (bank.get, bank.remove):
        with pytest.raises(UnknownAdapterError, match=r"loaded are \['plan'\]"):
            call(name)
    with pytest.raises(UnknownAdapterError):
        bank.replace(name, folders["plan"])
    assert bank.names == ("plan",)


@pytest.mark.parametrize("name", ["", "base", " plan", "plan\n", "a b", "ü", "x" * 129, None])
def test_names_that_no_adapter_may_have(
    bank: AdapterBank, folders: dict[str, Path], name: str
) -> None:
    with pytest.raises(AdapterNameError, match="allowed are 1 to 128 characters"):
        bank.load(name, folders["plan"])
    assert issubclass(AdapterNameError, AdapterError)
    assert len(bank) == 0


@pytest.mark.parametrize("name", ["plan", "org/plan:v1.2_x-y", "x" * 128, "Base"])
def test_names_that_may_be_used(bank: AdapterBank, folders: dict[str, Path], name: str) -> None:
    assert bank.load(name, folders["plan"]).name == name


def test_loading_the_same_weights_again_changes_nothing(
    bank: AdapterBank, folders: dict[str, Path], tmp_path: Path
) -> None:
    plan = bank.load("plan", folders["plan"])
    copy = shutil.copytree(folders["plan"], tmp_path / "copy")
    assert bank.load("plan", copy) is plan
    with pytest.raises(AdapterExistsError, match="'plan'"):
        bank.load("plan", folders["action"])
    assert bank.get("plan") is plan


def test_replace_returns_old_and_new(bank: AdapterBank, folders: dict[str, Path]) -> None:
    first = bank.load("plan", folders["plan"])
    bank.load("other", folders["keys"])
    old, new = bank.replace("plan", folders["action"])
    assert old is first
    assert bank.get("plan") is new
    assert new.digest != old.digest
    assert bank.names == ("plan", "other")
    assert bank.replace("plan", folders["action"]) == (new, new)


@pytest.mark.parametrize(("spoil", "error"), BROKEN, ids=["truncated", "nan", "dora"])
def test_a_bad_folder_leaves_the_bank_as_it_was(
    bank: AdapterBank,
    folders: dict[str, Path],
    tmp_path: Path,
    spoil: object,
    error: type[AdapterError],
) -> None:
    plan = bank.load("plan", folders["plan"])
    stack = bank.stacked_a(0, "v_proj", (plan, plan))
    bad = Path(shutil.copytree(folders["action"], tmp_path / "bad"))
    spoil(bad)  # type: ignore[operator]
    with pytest.raises(error):
        bank.load("action", bad)
    with pytest.raises(error):
        bank.replace("plan", bad)
    assert list(bank) == [plan]
    assert bank.stacked_a(0, "v_proj", (plan, plan)) is stack


def test_admission_sees_the_adapters_to_be_and_may_refuse(
    bank: AdapterBank, folders: dict[str, Path]
) -> None:
    seen: list[list[str]] = []

    def admit(adapters: Sequence[Adapter]) -> None:
        seen.append([adapter.name for adapter in adapters])
        if any(adapter.has("k_proj") for adapter in adapters):
            raise AdapterError("no key LoRA here")

    plan = bank.load("plan", folders["plan"], admit=admit)
    with pytest.raises(AdapterError, match="no key LoRA"):
        bank.load("keys", folders["keys"], admit=admit)
    with pytest.raises(AdapterError, match="no key LoRA"):
        bank.replace("plan", folders["keys"], admit=admit)
    assert seen == [["plan"], ["plan", "keys"], ["plan"]]
    assert list(bank) == [plan]


def test_what_an_adapter_says_about_itself(bank: AdapterBank, folders: dict[str, Path]) -> None:
    plan, keys = bank.load("plan", folders["plan"]), bank.load("keys", folders["keys"])
    assert plan.targets == {"q_proj", "v_proj"}
    assert keys.has("k_proj")
    assert not plan.has("k_proj")
    assert [keys.rank(layer, "k_proj") for layer in range(3)] == [0, 4, 0]
    assert keys.module(0, "k_proj") is None
    assert keys.module(1, "k_proj") is keys.weights.modules[1, "k_proj"]
    assert plan.path == folders["plan"]
    assert plan.digest == plan.weights.digest
    assert plan.a_digest == plan.weights.a_digest


def test_b_by_kv_head(bank: AdapterBank, folders: dict[str, Path]) -> None:
    keys = bank.load("keys", folders["keys"])
    for of_layer, target in ((keys.value_b, "v_proj"), (keys.key_b, "k_proj")):
        assert of_layer(0) is None
        by_head, lora_b = of_layer(1), keys.weights.modules[1, target].lora_b
        assert by_head is not None
        assert by_head.shape == (2, 4, 16)
        assert by_head.is_contiguous()
        assert of_layer(1) is by_head
        low_rank = torch.randn(5, 4)
        full = (low_rank @ lora_b.T).view(5, 2, 16)  # as a projection would give it
        torch.testing.assert_close(torch.einsum("tr,hrd->thd", low_rank, by_head), full)
        assert full.abs().max() > 0


def test_stacked_a_is_one_gemm_for_all(bank: AdapterBank, folders: dict[str, Path]) -> None:
    adapters = tuple(bank.load(name, path) for name, path in folders.items())
    hidden = torch.randn(5, 64)
    for layer, ranks in ((0, [4, 3, 0]), (1, [4, 3, 4])):
        stacked, rows = bank.stacked_a(layer, "v_proj", adapters)
        assert stacked.shape == (sum(ranks), 64)
        assert [row.stop - row.start for row in rows] == ranks
        together = hidden @ stacked.T
        for adapter, row in zip(adapters, rows, strict=True):
            module = adapter.module(layer, "v_proj")
            if module is not None:
                torch.testing.assert_close(together[:, row], hidden @ module.lora_a.T)
    assert bank.stacked_a(1, "v_proj", adapters)[0] is stacked


def test_stacked_a_of_none_and_of_one(bank: AdapterBank, folders: dict[str, Path]) -> None:
    plan, keys = bank.load("plan", folders["plan"]), bank.load("keys", folders["keys"])
    empty, rows = bank.stacked_a(0, "k_proj", (plan, keys))
    assert empty.shape == (0, 64)
    assert rows == (slice(0, 0), slice(0, 0))
    module = plan.module(0, "v_proj")
    assert module is not None
    alone, rows = bank.stacked_a(0, "v_proj", (keys, plan))
    assert rows == (slice(0, 0), slice(0, 4))
    assert alone.data_ptr() == module.lora_a.data_ptr()  # no second copy


def test_stacks_do_not_outlive_the_weights(bank: AdapterBank, folders: dict[str, Path]) -> None:
    plan, action = bank.load("plan", folders["plan"]), bank.load("action", folders["action"])
    before, _ = bank.stacked_a(0, "v_proj", (plan, action))
    _, new = bank.replace("plan", folders["keys"])
    _, rows = bank.stacked_a(1, "v_proj", (new, action))
    after, _ = bank.stacked_a(0, "v_proj", (new, action))
    assert [row.stop - row.start for row in rows] == [4, 3]
    assert before.shape[0] == 7
    assert after.shape[0] == 3
    # A turn that began before the change still gets its own weights.
    torch.testing.assert_close(bank.stacked_a(0, "v_proj", (plan, action))[0], before)
