"""The blocked backend against the definition: small blocks, so that every call crosses several."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from precache.ops import AttentionOutput, KeyStrip, ValueStrip, cpu, decode, native, reference
from precache.ops.contract import AttentionInputs, check
from tests.ops.cases import Case, in_float32, segment

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
Attend = Callable[[AttentionInputs], AttentionOutput]


def blocked(
    inputs: AttentionInputs,
    method: str,
    query_block: int = 48,
    key_block: int = 100,
    product_dtype: torch.dtype | None = None,
) -> AttentionOutput:
    """In blocks so small that most calls cross several."""
    check(inputs)
    dtype = product_dtype or inputs.q.dtype
    with torch.inference_mode():
        return cpu.attend(inputs, cpu.Tuning(method, query_block, key_block, dtype))


def as_chosen(inputs: AttentionInputs) -> AttentionOutput:
    """In the form and the blocks that the backend takes by itself."""
    check(inputs)
    with torch.inference_mode():
        return cpu.attend(inputs)


def by_the_kernel(inputs: AttentionInputs) -> AttentionOutput:
    """Decode steps in C, everything else as chosen."""
    if (reason := native.obstacle(torch.device("cpu"), torch.float32)) is not None:
        pytest.skip(reason)
    if inputs.q.dtype not in native.DTYPES:
        pytest.skip("the kernel has no float64")
    check(inputs)
    with torch.inference_mode():
        return native.attend(inputs)


METHODS = ("low_rank", "expanded", "fused")
FORMS: dict[str, Attend] = {
    **{method: functools.partial(blocked, method=method) for method in METHODS},
    "chosen": as_chosen,
    "native": by_the_kernel,
}


@pytest.fixture(params=FORMS)
def attend(request: pytest.FixtureRequest) -> Attend:
    """Every form of the backend in turn."""
    return FORMS[request.param]


def assert_same(got: AttentionOutput, expected: AttentionOutput) -> None:
    tolerance = TOLERANCE[got.out.dtype]
    torch.testing.assert_close(got.out, expected.out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(got.lse, expected.lse, atol=tolerance, rtol=tolerance)


def assert_different(got: AttentionOutput, wrong: AttentionOutput) -> None:
    assert (got.out - wrong.out).abs().max() > 0.01


# -- every shape and option ------------------------------------------------------------------------

OPTIONS = {
    "group": (1, 4),
    "rank": (None, 1, 16),
    "key_rank": (None, 8),
    "window": (None, 9, 5000),
    "softcap": (None, 3.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 130), (7, 7), (64, 150)])
def test_every_option_matches_reference(q_len: int, kv_len: int, dtype: torch.dtype) -> None:
    for chosen in itertools.product(*OPTIONS.values()):
        options = dict(zip(OPTIONS, chosen, strict=True))
        inputs = Case(q_len=q_len, kv_len=kv_len, dtype=dtype, **options).inputs()
        expected = reference.attend(inputs)
        for attend in FORMS.values():
            assert_same(attend(inputs), expected)


@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("kv_len", [1, 99, 100, 101, 1100])
@pytest.mark.parametrize("q_len", [1, 2, 7, 64, 130])
def test_every_length_matches_reference(q_len: int, kv_len: int, window: int | None) -> None:
    position = max(kv_len - q_len, 0)  # more queries than keys: they sit after the last key
    inputs = Case(q_len=q_len, kv_len=kv_len, q_positions=position, window=window).inputs()
    expected = reference.attend(inputs)
    for attend in FORMS.values():
        assert_same(attend(inputs), expected)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("query_block", [1, 13, 64, 1000])
@pytest.mark.parametrize("key_block", [1, 17, 64, 1000])
def test_block_sizes_do_not_change_the_result(
    query_block: int, key_block: int, method: str
) -> None:
    for window in (None, 50):
        inputs = Case(q_len=40, kv_len=130, key_rank=4, window=window).inputs()
        assert_same(blocked(inputs, method, query_block, key_block), reference.attend(inputs))


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (300, None), (None, 3.0)])
def test_long_prefill_matches_reference(window: int | None, softcap: float | None) -> None:
    inputs = Case(q_len=1500, kv_len=1700, num_kv_heads=1, window=window, softcap=softcap).inputs()
    assert_same(as_chosen(inputs), reference.attend(inputs))


def operators(inputs: AttentionInputs, attend: Attend) -> set[str]:
    """Names of the torch operators that a call runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        attend(inputs)
    return {event.key for event in profile.key_averages()}


def test_the_fused_kernel_runs_where_it_can() -> None:
    kernel = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert kernel in operators(Case(q_len=64, kv_len=300).inputs(), as_chosen)
    assert kernel in operators(Case(q_len=1, kv_len=300, rank=None).inputs(), as_chosen)
    assert kernel not in operators(Case(q_len=1, kv_len=300).inputs(), as_chosen)
    assert kernel not in operators(Case(q_len=64, kv_len=300, softcap=3.0).inputs(), as_chosen)


# -- the definition itself, against plain torch ----------------------------------------------------


def sdpa(inputs: AttentionInputs) -> Tensor:
    """Torch's own attention with the adapter's keys and values materialised."""
    k, v = inputs.k, inputs.v_base
    if inputs.k_lora is not None:
        x = inputs.k_lora.z @ inputs.k_lora.b
        half = x.shape[-1] // 2
        rotated = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
        k = k + x * inputs.k_lora.cos + rotated * inputs.k_lora.sin
    if inputs.v_lora is not None:
        v = v + inputs.v_lora.z @ inputs.v_lora.b
    q_len, kv_len = inputs.q.shape[1], k.shape[1]
    assert isinstance(inputs.q_positions, int)
    positions = inputs.q_positions + torch.arange(q_len)
    distance = positions[:, None] - (inputs.kv_start + torch.arange(kv_len))
    mask = (distance >= 0) & (distance < (inputs.window or kv_len + q_len))
    return functional.scaled_dot_product_attention(
        inputs.q[None], k[None], v[None], mask, scale=inputs.scale, enable_gqa=True
    )[0]


@pytest.mark.parametrize("key_rank", [None, 8])
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("q_len", [1, 70])
def test_reference_matches_torch(q_len: int, window: int | None, key_rank: int | None) -> None:
    inputs = Case(q_len=q_len, kv_len=150, window=window, key_rank=key_rank).inputs()
    torch.testing.assert_close(reference.attend(inputs).out, sdpa(inputs), atol=1e-5, rtol=1e-5)


def eager(inputs: AttentionInputs) -> Tensor:
    """As `sdpa` for a decode step, in separate products that round the scores to q's dtype."""
    v_lora = inputs.v_lora
    assert v_lora is not None
    v = inputs.v_base + v_lora.z @ v_lora.b
    group = inputs.q.shape[0] // v.shape[0]
    k, v = inputs.k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = inputs.q @ k.transpose(1, 2) * inputs.scale
    return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v


def rms_errors(
    case: Case, attend: Attend, plain_torch: Callable[[AttentionInputs], Tensor]
) -> tuple[float, float]:
    """Error of the backend and of plain torch to the float32 reference."""
    errors = []
    for seed in range(4):
        inputs = case.inputs(seed)
        exact = reference.attend(in_float32(inputs)).out
        errors.append(torch.stack([attend(inputs).out - exact, plain_torch(inputs) - exact]))
    ours, theirs = torch.cat(errors, 1).square().mean((1, 2, 3)).sqrt().tolist()
    return ours, theirs


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("key_rank", [None, 8])
@pytest.mark.parametrize("q_len", [1, 7, 70])
def test_bfloat16_with_wide_products_is_as_close_as_sdpa(
    q_len: int, key_rank: int | None, method: str
) -> None:
    """The way of CPUs without bfloat16 products."""
    case = Case(q_len=q_len, kv_len=430, rank=8, key_rank=key_rank, dtype=torch.bfloat16)
    attend = functools.partial(blocked, method=method, product_dtype=torch.float32)
    ours, theirs = rms_errors(case, attend, sdpa)
    assert ours <= 2 * theirs + 1e-4


@pytest.mark.parametrize("attend", [decode.attend_one, *(FORMS[name] for name in METHODS)])
def test_bfloat16_with_own_products_is_as_close_as_eager(attend: Attend) -> None:
    """The way of CPUs with bfloat16 products, CUDA and MPS."""
    case = Case(q_len=1, kv_len=430, rank=8, dtype=torch.bfloat16)
    ours, theirs = rms_errors(case, attend, eager)
    assert ours <= 2 * theirs + 1e-4


@pytest.mark.parametrize("group", [3, 4])
@pytest.mark.parametrize("head_dim", [16, 128])
def test_decode_step_matches_reference_for_both_orders_of_the_product(
    head_dim: int, group: int
) -> None:
    for rank, window, softcap in itertools.product((None, 4), (None, 50), (None, 3.0)):
        inputs = Case(
            kv_len=300, head_dim=head_dim, group=group, rank=rank, window=window, softcap=softcap
        ).inputs()
        assert_same(decode.attend_one(inputs), reference.attend(inputs))


# -- who sees what ---------------------------------------------------------------------------------


def test_scattered_queries_match_the_rows_of_a_full_prefill(attend: Attend) -> None:
    rows = [0, 3, 4, 90, 91, 200, 299]
    whole = Case(q_len=300, kv_len=300, window=80, key_rank=4).inputs()
    scattered = whole._replace(q=whole.q[:, rows], q_positions=torch.tensor(rows))
    full = attend(whole)
    rows_of_full = AttentionOutput(full.out[:, rows], full.lse[:, rows])
    assert_same(attend(scattered), rows_of_full)
    assert_same(blocked(scattered, "fused", query_block=3, key_block=50), rows_of_full)
    assert_different(attend(scattered), attend(scattered._replace(q_positions=0)))


def test_keys_after_the_last_query_are_ignored(attend: Attend) -> None:
    inputs = Case(q_len=20, kv_len=300, q_positions=150).inputs()
    poisoned = inputs._replace(k=inputs.k.clone(), v_base=inputs.v_base.clone())
    poisoned.k[:, 170:] = torch.nan
    poisoned.v_base[:, 170:] = torch.nan
    assert_same(attend(poisoned), reference.attend(inputs))
    assert_different(attend(inputs), attend(inputs._replace(q_positions=280)))


@pytest.mark.parametrize("q_len", [1, 60])
def test_window_never_touches_what_lies_outside(q_len: int, attend: Attend) -> None:
    inputs = Case(q_len=q_len, kv_len=300, window=30).inputs()
    outside = 300 - q_len - 30 + 1
    poisoned = inputs._replace(k=inputs.k.clone(), v_base=inputs.v_base.clone())
    poisoned.k[:, :outside] = torch.nan
    poisoned.v_base[:, :outside] = torch.nan
    assert_same(attend(poisoned), reference.attend(inputs))
    assert_different(attend(inputs), attend(inputs._replace(window=None)))


def test_window_counts_the_query_itself(attend: Attend) -> None:
    inputs = Case(q_len=5, kv_len=60, window=1, rank=None, group=1).inputs()
    torch.testing.assert_close(attend(inputs).out, inputs.v_base[:, 55:])


@pytest.mark.parametrize("method", METHODS)
def test_row_that_sees_no_key_is_zero(method: str) -> None:
    inputs = Case(q_len=8, kv_len=30, kv_start=100, q_positions=96).inputs()
    got = blocked(inputs, method, query_block=3, key_block=10)
    assert (got.out[:, :4] == 0).all()
    assert (got.lse[:, :4] == -torch.inf).all()
    assert got.lse[:, 4:].isfinite().all()
    assert_same(got, reference.attend(inputs))


def test_call_in_which_no_row_sees_a_key_is_zero(attend: Attend) -> None:
    before = Case(q_len=4, kv_len=30, kv_start=100, q_positions=50).inputs()
    past_window = Case(q_len=4, kv_len=30, q_positions=500, window=20).inputs()
    for inputs in (before, past_window):
        got = attend(inputs)
        assert (got.out == 0).all()
        assert (got.lse == -torch.inf).all()
        assert_same(got, reference.attend(inputs))


def test_row_may_see_nothing_in_a_block_and_keys_in_a_later_one() -> None:
    inputs = Case(q_len=4, kv_len=100, q_positions=[30, 31, 80, 81], window=12).inputs()
    for method in METHODS:
        got = blocked(inputs, method, query_block=4, key_block=10)
        assert_same(got, reference.attend(inputs))


def test_large_scores_do_not_overflow(attend: Attend) -> None:
    inputs = Case(q_len=20, kv_len=300).inputs()
    inputs = inputs._replace(q=inputs.q * 1000)
    got = attend(inputs)
    assert got.out.isfinite().all()
    torch.testing.assert_close(got.lse, reference.attend(inputs).lse)


def test_nan_in_a_key_reaches_the_rows_that_see_it(attend: Attend) -> None:
    inputs = Case(q_len=20, kv_len=200).inputs()
    inputs.k[:, 190] = torch.nan
    out = attend(inputs).out
    assert out[:, 10:].isnan().all()
    assert out[:, :10].isfinite().all()


# -- the wrong method differs ----------------------------------------------------------------------


@pytest.mark.parametrize("q_len", [1, 60])
def test_every_part_of_the_call_matters(q_len: int, attend: Attend) -> None:
    inputs = Case(q_len=q_len, kv_len=300, key_rank=4, window=200, softcap=3.0).inputs()
    v_lora, k_lora = inputs.v_lora, inputs.k_lora
    assert v_lora is not None
    assert k_lora is not None
    swapped_heads = inputs.q.view(2, 3, q_len, -1).transpose(0, 1).reshape(inputs.q.shape)
    opposite_turn = KeyStrip(k_lora.z, k_lora.b, k_lora.cos, -k_lora.sin)
    wrong_calls = [
        inputs._replace(v_lora=None),
        inputs._replace(v_lora=ValueStrip(v_lora.z, v_lora.b.flip(0))),
        inputs._replace(k_lora=None),
        inputs._replace(k_lora=opposite_turn),
        inputs._replace(window=None),
        inputs._replace(softcap=None),
        inputs._replace(scale=inputs.scale * 2),
        inputs._replace(q=swapped_heads),
    ]
    got = attend(inputs)
    assert_same(got, reference.attend(inputs))
    for wrong in wrong_calls:
        assert_different(got, attend(wrong))


def test_inputs_are_left_as_they_were(attend: Attend) -> None:
    inputs = Case(q_len=60, kv_len=300, key_rank=4, softcap=3.0).inputs()
    untouched = Case(q_len=60, kv_len=300, key_rank=4, softcap=3.0).inputs()
    attend(inputs)
    for tensor, expected in zip(inputs[:3], untouched[:3], strict=True):
        assert torch.equal(tensor, expected)
    assert torch.equal(inputs.v_lora.z, untouched.v_lora.z)
    assert torch.equal(inputs.k_lora.z, untouched.k_lora.z)


def test_segment_helper_keeps_positions() -> None:
    part = segment(Case(kv_len=40, kv_start=10, key_rank=2).inputs(), 15, 40)
    assert (part.kv_start, part.k.shape[1], part.k_lora.cos.shape[0]) == (25, 25, 25)
