"""The Triton backend against the definition, in Triton's interpreter: small calls, because each program is slow."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from precache.ops import AttentionOutput, BackendUnavailableError, lora_attention, reference
from precache.ops.backends import choose_backend
from precache.ops.contract import AttentionInputs, ValueStrip, check
from tests.ops.cases import Case, in_float32
from tests.ops.test_attention import assert_different, assert_same, rms_errors, sdpa

pytest.importorskip("triton", reason="triton is not installed")

from precache.ops import triton as backend
from precache.ops.triton import Tiles

HALF = (torch.bfloat16, torch.float16)


def attend(inputs: AttentionInputs, splits: int | None = 1) -> AttentionOutput:
    """In blocks so small that most calls cross several."""
    check(inputs)
    return backend.attend(inputs, Tiles(16, 16, 4, 2, splits))


CASES = {
    "decode": Case(kv_len=37),
    "decode, rank of a whole tile": Case(kv_len=37, rank=16),
    "decode, rank beyond a tile": Case(kv_len=20, rank=17),
    "decode, base": Case(kv_len=37, rank=None),
    "decode, one head a group": Case(kv_len=37, group=1),
    "decode, window and softcap": Case(kv_len=60, window=21, softcap=3.0),
    "decode, key strip": Case(kv_len=37, key_rank=4),
    "prefill": Case(q_len=9, kv_len=9),
    "prefill, window wider than everything": Case(q_len=9, kv_len=20, window=500),
    "extend": Case(q_len=7, kv_len=50, kv_start=11),
    "extend, base": Case(q_len=7, kv_len=50, rank=None, group=4),
    "extend, window": Case(q_len=8, kv_len=50, window=5),
    "extend, softcap": Case(q_len=7, kv_len=40, softcap=3.0),
    "extend, key strip alone": Case(q_len=7, kv_len=40, rank=None, key_rank=8),
    "extend, everything": Case(q_len=7, kv_len=40, key_rank=4, window=20, softcap=3.0),
    "head_dim that is no power of 2": Case(q_len=7, kv_len=40, head_dim=24, key_rank=2),
    "more queries than keys": Case(q_len=9, kv_len=6, q_positions=3),
    "window wider than the keys, which lie far behind": Case(3, 20, q_positions=40, window=30),
    "scattered": Case(q_len=6, kv_len=50, q_positions=[0, 3, 17, 17, 30, 49]),
    "scattered, window": Case(q_len=4, kv_len=60, q_positions=[3, 31, 50, 51], window=12),
}


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_kind_of_call_matches_reference(case: Case, splits: int) -> None:
    inputs = case.inputs()
    assert_same(attend(inputs, splits), reference.attend(inputs))


@pytest.mark.parametrize("q_len", [1, 17, 65])
def test_own_choice_of_tiles_matches_reference(q_len: int) -> None:
    inputs = Case(q_len=q_len, kv_len=70, num_kv_heads=1, group=1).inputs()
    got = lora_attention(**inputs._asdict(), backend="triton")
    assert_same(got, reference.attend(inputs))


@pytest.mark.parametrize(("q_len", "key_rank", "splits"), [(1, None, 1), (1, None, 2), (5, 4, 1)])
@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_is_as_close_as_sdpa(
    dtype: torch.dtype, q_len: int, key_rank: int | None, splits: int
) -> None:
    case = Case(q_len, kv_len=40, num_kv_heads=1, key_rank=key_rank, dtype=dtype)
    ours, theirs = rms_errors(case, partial(attend, splits=splits), sdpa)
    assert ours <= 2 * theirs + 1e-5


@pytest.mark.parametrize("dtype", HALF)
def test_log_sum_exp_is_float32_in_half_precision(dtype: torch.dtype) -> None:
    inputs = Case(q_len=3, kv_len=40, dtype=dtype).inputs()
    got, exact = attend(inputs), reference.attend(in_float32(inputs))
    assert got.lse.dtype == torch.float32
    torch.testing.assert_close(got.lse, exact.lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("splits", [1, 2])
def test_keys_outside_are_never_touched(splits: int) -> None:
    inputs = Case(q_len=4, kv_len=60, q_positions=40, window=10).inputs()
    poisoned = inputs._replace(k=inputs.k.clone(), v_base=inputs.v_base.clone())
    assert inputs.v_lora is not None
    z = inputs.v_lora.z.clone()
    for tensor in (poisoned.k[0], poisoned.k[1], poisoned.v_base[0], poisoned.v_base[1], z):
        tensor[:31] = torch.nan
        tensor[44:] = torch.nan
    poisoned = poisoned._replace(v_lora=ValueStrip(z, inputs.v_lora.b))
    assert_same(attend(poisoned, splits), reference.attend(inputs))


@pytest.mark.parametrize("splits", [1, 2])
def test_rows_that_see_no_key_are_zero(splits: int) -> None:
    inputs = Case(q_len=8, kv_len=30, kv_start=100, q_positions=96).inputs()
    got = attend(inputs, splits)
    assert (got.out[:, :4] == 0).all()
    assert (got.lse[:, :4] == -torch.inf).all()
    assert_same(got, reference.attend(inputs))
    past_window = Case(q_len=4, kv_len=30, q_positions=500, window=20).inputs()
    assert_same(attend(past_window, splits), reference.attend(past_window))


def test_nan_in_a_key_reaches_the_rows_that_see_it() -> None:
    inputs = Case(q_len=8, kv_len=40).inputs()
    inputs.k[:, 36] = torch.nan
    out = attend(inputs).out
    assert out[:, 4:].isnan().all()
    assert out[:, :4].isfinite().all()


def test_large_scores_do_not_overflow() -> None:
    inputs = Case(q_len=4, kv_len=40, softcap=50.0).inputs()
    inputs = inputs._replace(q=inputs.q * 1e6)
    assert_same(attend(inputs, 2), reference.attend(inputs))


def test_every_part_of_the_call_matters() -> None:
    inputs = Case(4, 40, num_kv_heads=1, group=4, key_rank=4, window=30, softcap=3.0).inputs()
    v_lora, k_lora = inputs.v_lora, inputs.k_lora
    assert v_lora is not None
    assert k_lora is not None
    got = attend(inputs)
    for wrong in (
        {"v_lora": None},
        {"v_lora": ValueStrip(v_lora.z, v_lora.b.flip(1))},
        {"k_lora": None},
        {"window": None},
        {"softcap": None},
        {"q_positions": 33},
        {"q": inputs.q.flip(0)},
    ):
        assert_different(got, attend(inputs._replace(**wrong)))


# -- where it runs ---------------------------------------------------------------------------------


def test_float64_is_refused_when_asked_for_and_left_to_torch_by_auto() -> None:
    call = Case(dtype=torch.float64).inputs()._asdict()
    with pytest.raises(BackendUnavailableError, match=r"'triton' cannot be used: .*float64"):
        lora_attention(**call, backend="triton")
    assert choose_backend("auto", torch.device("cuda"), torch.float64) == "cpu"


def test_auto_takes_triton_on_a_gpu_only() -> None:
    """Under the interpreter the kernels run anywhere, so that this can be asked without a GPU."""
    for dtype in (torch.float32, *HALF):
        assert choose_backend("auto", torch.device("cuda"), dtype) == "triton"
        assert choose_backend("auto", torch.device("cpu"), dtype) in ("cpu", "native")
        assert choose_backend("auto", torch.device("mps"), dtype) == "cpu"
        assert choose_backend("cpu", torch.device("cuda"), dtype) == "cpu"
