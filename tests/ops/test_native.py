"""The C kernels: against the definition, in all their dtypes, over one buffer and, for decode steps, over pages."""

from __future__ import annotations

import ctypes
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from precache.ops import (
    AttentionContractError,
    BackendUnavailableError,
    cpu,
    lora_attention,
    native,
    reference,
)
from precache.ops.backends import choose_backend
from precache.ops.contract import AttentionInputs
from precache.ops.native import build, library
from precache.ops.paged import PagedStrips, paged_lora_attention
from tests.ops.cases import Case, in_float32
from tests.ops.paged_cases import BASE, Batch, paged_reference
from tests.ops.test_attention import assert_different, assert_same

CPU = torch.device("cpu")
HALF = (torch.bfloat16, torch.float16)

needs_the_kernel = pytest.mark.skipif(
    library.load()[0] is None, reason=f"the kernel: {library.load()[1]}"
)


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def assert_rounded_once(inputs: AttentionInputs) -> None:
    """Half precision in and out, float32 between."""
    dtype = inputs.q.dtype
    exact, got = reference.attend(in_float32(inputs)), native.attend(inputs)
    assert got.out.dtype == dtype
    ulp = torch.finfo(dtype).eps * exact.out.abs()
    assert bool(((got.out.float() - exact.out).abs() <= 0.51 * ulp + 1e-5).all())
    torch.testing.assert_close(got.lse, exact.lse, atol=1e-4, rtol=1e-5)


# Around the ends of a tile (32 keys) and of a piece (512).
@needs_the_kernel
@pytest.mark.parametrize("kv_len", [1, 31, 32, 33, 63, 511, 512, 513, 1500])
@pytest.mark.parametrize("rank", [None, 1, 8, 13])
def test_every_length_matches_the_definition(kv_len: int, rank: int | None) -> None:
    inputs = Case(kv_len=kv_len, rank=rank).inputs()
    assert_same(native.attend(inputs), reference.attend(inputs))
    if rank is not None:
        without = native.attend(inputs._replace(v_lora=None))
        assert_different(native.attend(inputs), without)


@needs_the_kernel
@pytest.mark.parametrize(("heads", "group"), [(1, 1), (3, 3), (2, 16), (8, 4)])
@pytest.mark.parametrize("head_dim", [8, 24, 64, 72, 128, 256])
def test_every_shape_matches_the_definition(heads: int, group: int, head_dim: int) -> None:
    case = Case(kv_len=600, num_kv_heads=heads, group=group, head_dim=head_dim, rank=8)
    inputs = case.inputs()
    assert_same(native.attend(inputs), reference.attend(inputs))


@needs_the_kernel
@pytest.mark.parametrize("window", [None, 1, 40, 700])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("kv_start", [0, 100])
def test_window_softcap_and_start_match_the_definition(
    window: int | None, softcap: float | None, kv_start: int
) -> None:
    case = Case(kv_len=600, window=window, softcap=softcap, kv_start=kv_start)
    assert_same(native.attend(case.inputs()), reference.attend(case.inputs()))


# Around the ends of a tile (32 keys) and of a piece (512), and where the last keys are not a group of four.
@needs_the_kernel
@pytest.mark.parametrize("kv_len", [1, 31, 32, 34, 511, 512, 513, 1500])
@pytest.mark.parametrize("rank", [None, 8])
@pytest.mark.parametrize("key_rank", [1, 4, 24, 64])
def test_low_rank_keys_match_the_definition(kv_len: int, rank: int | None, key_rank: int) -> None:
    inputs = Case(kv_len=kv_len, rank=rank, key_rank=key_rank).inputs()
    assert_same(native.attend(inputs), reference.attend(inputs))
    if kv_len > 1:  # a single key has all the weight whatever its score
        assert_different(native.attend(inputs), native.attend(inputs._replace(k_lora=None)))


@needs_the_kernel
@pytest.mark.parametrize(("heads", "group"), [(1, 1), (2, 16), (8, 4)])
@pytest.mark.parametrize("head_dim", [16, 48, 64, 128, 256])
@pytest.mark.parametrize("window", [None, 40])
def test_every_shape_with_low_rank_keys_matches_the_definition(
    heads: int, group: int, head_dim: int, window: int | None
) -> None:
    case = Case(
        kv_len=600,
        num_kv_heads=heads,
        group=group,
        head_dim=head_dim,
        key_rank=4,
        window=window,
        kv_start=100,
        softcap=3.0,
    )
    assert_same(native.attend(case.inputs()), reference.attend(case.inputs()))


@needs_the_kernel
@pytest.mark.parametrize("key_rank", [None, 4])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("head_dim", [16, 128])
def test_half_precision_is_rounded_once(
    dtype: torch.dtype, head_dim: int, key_rank: int | None
) -> None:
    case = Case(kv_len=700, rank=8, key_rank=key_rank, head_dim=head_dim, dtype=dtype)
    inputs = case.inputs()
    assert_rounded_once(inputs)


@needs_the_kernel
@pytest.mark.parametrize("dtype", HALF)
def test_every_finite_half_survives_reading_and_writing(dtype: torch.dtype) -> None:
    """Over a single key the output is its value."""
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    values = values[values.isfinite()].view(-1, 1, 64)
    inputs = Case(kv_len=1, num_kv_heads=len(values), group=1, head_dim=64, rank=None, dtype=dtype)
    got = native.attend(inputs.inputs()._replace(v_base=values))
    assert torch.equal(got.out, values)


@needs_the_kernel
@pytest.mark.usefixtures("one_thread")
def test_threads_change_nothing() -> None:
    inputs = Case(kv_len=5000, head_dim=64, rank=8).inputs()
    alone = native.attend(inputs)
    torch.set_num_threads(2)
    together = native.attend(inputs)
    assert torch.equal(alone.out, together.out)
    assert torch.equal(alone.lse, together.lse)


@needs_the_kernel
def test_keys_that_the_query_does_not_see_are_not_read() -> None:
    inputs = Case(kv_len=90, q_positions=70, window=50).inputs()
    poisoned = inputs._replace(k=inputs.k.clone(), v_base=inputs.v_base.clone())
    for hidden in (slice(0, 21), slice(71, 90)):
        poisoned.k[:, hidden] = poisoned.v_base[:, hidden] = torch.nan
    assert_same(native.attend(poisoned), reference.attend(inputs))


@needs_the_kernel
@pytest.mark.parametrize(
    "case",
    [
        Case(q_len=3, q_positions=[5, 6, 9]),
        Case(q_len=3, group=17),
        Case(key_rank=65, kv_len=80),
        Case(key_rank=4, head_dim=24),
        Case(head_dim=12),
        Case(group=17),
        Case(rank=257, kv_len=50),
    ],
    ids=[
        "listed positions",
        "wide group of queries",
        "key rank",
        "odd halves",
        "odd heads",
        "wide group",
        "rank",
    ],
)
def test_what_the_kernel_does_not_take_is_the_blocked_backends(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = cpu.attend(case.inputs())
    monkeypatch.setattr(native, "run", lambda _: pytest.fail("the kernel ran"))
    got = native.attend(case.inputs())
    assert torch.equal(got.out, expected.out)


@pytest.fixture
def prefills(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gives the same numbers on other processors, where "native" leaves prefill to torch."""
    monkeypatch.setattr(native, "_prefills", lambda: True)
    monkeypatch.setattr(native.cpu, "attend", lambda _: pytest.fail("the kernel did not run"))


# Around the ends of a group of rows (6), a tile (96 keys), a block (384 rows) and a piece (512 keys).
@needs_the_kernel
@pytest.mark.usefixtures("prefills")
@pytest.mark.parametrize("q_len", [2, 3, 17, 128, 129, 300])
@pytest.mark.parametrize("before", [0, 1, 95, 1500])
@pytest.mark.parametrize("rank", [None, 8])
def test_prefill_of_every_length_matches_the_definition(
    q_len: int, before: int, rank: int | None
) -> None:
    inputs = Case(q_len=q_len, kv_len=before + q_len, rank=rank).inputs()
    assert_same(native.attend(inputs), reference.attend(inputs))
    if rank is not None:
        assert_different(native.attend(inputs), native.attend(inputs._replace(v_lora=None)))


@needs_the_kernel
@pytest.mark.usefixtures("prefills")
@pytest.mark.parametrize(("heads", "group"), [(1, 1), (3, 3), (2, 16), (8, 4)])
@pytest.mark.parametrize("head_dim", [8, 24, 64, 72, 128, 256])
def test_prefill_of_every_shape_matches_the_definition(
    heads: int, group: int, head_dim: int
) -> None:
    case = Case(q_len=70, kv_len=650, num_kv_heads=heads, group=group, head_dim=head_dim, rank=13)
    assert_same(native.attend(case.inputs()), reference.attend(case.inputs()))


@needs_the_kernel
@pytest.mark.usefixtures("prefills")
@pytest.mark.parametrize("window", [None, 1, 40, 700, 2**40])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("kv_start", [0, 100])
@pytest.mark.parametrize("key_rank", [None, 4])
def test_prefill_with_everything_matches_the_definition(
    window: int | None, softcap: float | None, kv_start: int, key_rank: int | None
) -> None:
    case = Case(
        q_len=50,
        kv_len=600,
        window=window,
        softcap=softcap,
        kv_start=kv_start,
        key_rank=key_rank,
    )
    inputs = case.inputs()
    assert_same(native.attend(inputs), reference.attend(inputs))
    if key_rank is not None and window != 1:
        assert_different(native.attend(inputs), native.attend(inputs._replace(k_lora=None)))


@needs_the_kernel
@pytest.mark.usefixtures("prefills")
@pytest.mark.parametrize("position", [0, 37, 59, 2**40])
@pytest.mark.parametrize("window", [None, 7, 2**40 - 20, 2**62])
@pytest.mark.parametrize("kv_start", [0, 45])
def test_prefill_at_any_position_matches_the_definition(
    position: int, window: int | None, kv_start: int
) -> None:
    """Also queries that come before every key, or too far behind them to see one."""
    case = Case(q_len=9, kv_len=60, q_positions=position, window=window, kv_start=kv_start)
    assert_same(native.attend(case.inputs()), reference.attend(case.inputs()))


@needs_the_kernel
@pytest.mark.usefixtures("prefills")
@pytest.mark.parametrize("key_rank", [None, 4])
@pytest.mark.parametrize("dtype", HALF)
def test_prefill_in_half_precision_is_rounded_once(
    dtype: torch.dtype, key_rank: int | None
) -> None:
    inputs = Case(q_len=40, kv_len=700, rank=8, key_rank=key_rank, dtype=dtype).inputs()
    assert_rounded_once(inputs)


@needs_the_kernel
@pytest.mark.usefixtures("one_thread", "prefills")
def test_threads_change_prefill_by_rounding_only() -> None:
    """With more of them the keys of a block are cut into pieces."""
    inputs = Case(q_len=20, kv_len=5000, head_dim=64, rank=8).inputs()
    alone = native.attend(inputs)
    assert_same(alone, reference.attend(inputs))
    torch.set_num_threads(5)
    assert_same(native.attend(inputs), alone)


@needs_the_kernel
@pytest.mark.usefixtures("prefills")
def test_prefill_reads_no_key_that_no_query_sees() -> None:
    inputs = Case(q_len=10, kv_len=300, q_positions=200, window=50, key_rank=4).inputs()
    k_lora = inputs.k_lora
    assert k_lora is not None
    poisoned = inputs._replace(
        k=inputs.k.clone(),
        v_base=inputs.v_base.clone(),
        k_lora=replace(k_lora, z=k_lora.z.clone()),
    )
    for hidden in (slice(0, 151), slice(210, 300)):
        poisoned.k[:, hidden] = poisoned.v_base[:, hidden] = torch.nan
        poisoned.k_lora.z[hidden] = torch.nan
    assert_same(native.attend(poisoned), reference.attend(inputs))


@needs_the_kernel
@pytest.mark.usefixtures("prefills")
def test_prefill_keeps_infinities_and_nans_apart() -> None:
    inputs = Case(q_len=4, kv_len=300, rank=None).inputs()
    q, k, v = inputs.q.clone(), inputs.k.clone(), inputs.v_base.clone()
    q[..., 0], k[:, :290, 0] = 1.0, -torch.inf  # whole tiles of hidden keys
    v[:, :290] = 1e38
    hidden = inputs._replace(q=q, k=k, v_base=v)
    assert_same(native.attend(hidden), reference.attend(hidden))
    k[0, 298] = torch.nan  # seen by the last two queries
    seen = native.attend(hidden._replace(k=k)).out.isnan().all(-1)
    assert seen[:3].tolist() == [[False, False, True, True]] * 3
    assert not seen[3:].any()


@needs_the_kernel
def test_prefill_is_torchs_where_its_products_may_be_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = Case(q_len=7, kv_len=60).inputs()
    monkeypatch.setattr(native, "run", lambda _: pytest.fail("the kernel ran"))
    monkeypatch.setattr(native, "_prefills", lambda: False)
    assert torch.equal(native.attend(inputs).out, cpu.attend(inputs).out)


BATCHES = {
    "two adapters": Batch(((1, 30, 2), (1, 17, 0), (1, 600, 2))),
    "with the base": Batch(((1, 30, 2), (1, 1, BASE), (1, 24, 1))),
    "no strips": Batch(((1, 30, 0), (1, 9, 0)), rank=None),
    "window and softcap": Batch(((1, 30, 2), (1, 7, 1)), window=11, softcap=3.0),
    "one row a page": Batch(((1, 7, 1), (1, 3, 0)), page_size=1),
    "pages wider than a tile": Batch(((1, 130, 1), (1, 63, 0)), page_size=64),
    "pages as vLLM's": Batch(((1, 700, 1), (1, 33, 0)), page_size=32, head_dim=64, rank=8),
}


@needs_the_kernel
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_every_paged_batch_matches_the_definition(batch: Batch) -> None:
    inputs = batch.inputs()
    assert_same(paged_lora_attention(inputs, backend="native"), paged_reference(inputs))


@needs_the_kernel
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("name", ["two adapters", "pages wider than a tile", "pages as vLLM's"])
def test_keys_that_lie_column_by_column_are_the_same(name: str, dtype: torch.dtype) -> None:
    inputs = replace(BATCHES[name], dtype=dtype).inputs()
    by_column = inputs.k.transpose(1, 3).contiguous().transpose(1, 3)
    assert by_column.stride(1) == 1
    got = paged_lora_attention(inputs._replace(k=by_column), backend="native")
    expected = paged_lora_attention(inputs, backend="native")
    torch.testing.assert_close(got.out, expected.out, atol=1e-5, rtol=2e-2)
    with pytest.raises(AttentionContractError, match=r"k\.stride"):
        paged_lora_attention(inputs._replace(k=by_column))


@needs_the_kernel
def test_every_sequence_reads_its_own_adapter_and_pages() -> None:
    inputs = BATCHES["two adapters"].inputs()
    strips = inputs.strips
    assert strips is not None
    got = paged_lora_attention(inputs, backend="native")
    turned = PagedStrips(strips.z, strips.b, strips.adapter_index.roll(1))
    for wrong in (
        inputs._replace(strips=turned),
        inputs._replace(block_table=inputs.block_table.roll(1, 0).contiguous().clamp(min=0)),
        inputs._replace(kv_lens=inputs.kv_lens - 1),
    ):
        if wrong.block_table is inputs.block_table:
            assert_different(paged_lora_attention(wrong, backend="native"), got)
        else:
            out = paged_lora_attention(wrong, backend="native").out
            assert not torch.allclose(out, got.out, atol=1e-3, equal_nan=True)


@needs_the_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [*range(1, 9), 61, 600])
def test_a_window_may_start_anywhere_in_keys_by_column(window: int, dtype: torch.dtype) -> None:
    batch = Batch(((1, 700, 1), (1, 33, 0)), page_size=32, window=window, dtype=dtype)
    inputs = batch.inputs()
    by_column = inputs.k.transpose(1, 3).contiguous().transpose(1, 3)
    got = paged_lora_attention(inputs._replace(k=by_column), backend="native")
    expected = paged_lora_attention(inputs, backend="native")
    torch.testing.assert_close(got.out, expected.out, atol=1e-5, rtol=2e-2)


@needs_the_kernel
@pytest.mark.parametrize("window", [2**31, 2**32, 10**12])
def test_a_window_beyond_32_bits_hides_nothing(window: int) -> None:
    inputs = BATCHES["two adapters"].inputs()
    got = paged_lora_attention(inputs._replace(window=window), backend="native")
    assert_same(got, paged_lora_attention(inputs, backend="native"))


@needs_the_kernel
def test_a_window_far_behind_the_keys_sees_nothing() -> None:
    inputs = Case(window=5, q_positions=2**32 + 10).inputs()
    assert_same(native.attend(inputs), reference.attend(inputs))


@needs_the_kernel
@pytest.mark.parametrize("kv_len", [40, 1500])
def test_a_score_of_minus_infinity_hides_its_key(kv_len: int) -> None:
    """Also where a tile, or a piece, has no other."""
    inputs = Case(kv_len=kv_len).inputs()
    q, k = inputs.q.clone(), inputs.k.clone()
    q[..., 0], k[:, : kv_len - 3, 0] = 1.0, -torch.inf
    for poisoned in (inputs._replace(q=q, k=k), inputs._replace(q=q, k=k, q_positions=5)):
        assert_same(native.attend(poisoned), reference.attend(poisoned))


@needs_the_kernel
def test_keys_far_below_the_maximum_count_for_nothing() -> None:
    inputs = Case(kv_len=2, rank=None).inputs()
    q, k, v = inputs.q.clone(), inputs.k.clone(), inputs.v_base.clone()
    q.fill_(1.0)
    k[:, 0], k[:, 1], v[:, 0], v[:, 1] = -100.0, 100.0, 1e38, 1.0
    huge = inputs._replace(q=q, k=k, v_base=v)
    assert_same(native.attend(huge), reference.attend(huge))


@needs_the_kernel
def test_a_sequence_without_a_query_is_refused() -> None:
    """Row 1 would be taken for sequence 1's."""
    inputs = Batch(((1, 30, 0), (1, 7, 1), (1, 12, 1))).inputs()
    starts = torch.tensor([0, 1, 1, 2], dtype=torch.int32)
    with pytest.raises(BackendUnavailableError, match="one query a sequence"):
        paged_lora_attention(inputs._replace(q=inputs.q[:2], query_start=starts), backend="native")


@needs_the_kernel
def test_paged_prefill_is_refused() -> None:
    with pytest.raises(BackendUnavailableError, match="'native'.*one query a sequence"):
        paged_lora_attention(Batch().inputs(), backend="native")


def test_other_dtypes_and_devices_are_refused_by_name() -> None:
    with pytest.raises(BackendUnavailableError, match=r"'native' cannot be used: .*float64"):
        lora_attention(**Case(dtype=torch.float64).inputs()._asdict(), backend="native")
    assert "cuda" in (native.obstacle(torch.device("cuda"), torch.float32) or "")


@pytest.mark.parametrize(
    ("file", "struct", "call"),
    [
        ("common.h", "key_strip", library.KeyStripCall),
        ("decode.c", "decode_call", library.DecodeCall),
        ("prefill.c", "prefill_call", library.PrefillCall),
    ],
)
def test_both_sides_agree_on_the_calls(
    file: str, struct: str, call: type[ctypes.Structure]
) -> None:
    source = (build.HERE / file).read_text()
    body = source[source.index(f"struct {struct} {{") :]
    body = re.sub(r"/\*.*?\*/", "", body[: body.index("};")], flags=re.DOTALL)
    assert re.findall(r"(\w+)(?=[,;])", body) == [name for name, *_ in call._fields_]


def test_both_sides_agree_on_the_limits() -> None:
    source = build.HEADER.read_text()
    for name in ("MAX_GROUP", "MAX_HEAD_DIM", "MAX_RANK", "MAX_KEY_RANK", "LANES"):
        assert f"#define {name} {getattr(library, name)}\n" in source


@pytest.fixture
def unloaded() -> Iterator[None]:
    caches = (library.load, choose_backend)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.usefixtures("unloaded")
def test_without_the_library_auto_takes_torch_and_asking_for_it_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "kernels.so")
    assert choose_backend("auto", CPU, torch.float32) == "cpu"
    with pytest.raises(BackendUnavailableError, match=r"python -m precache\.ops\.native"):
        choose_backend("native", CPU, torch.float32)


@pytest.mark.usefixtures("unloaded")
def test_a_file_that_is_no_library_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "kernels.so"
    broken.write_bytes(b"\x7fELF nothing")
    monkeypatch.setattr(library, "LIBRARY", broken)
    assert "cannot be loaded" in (native.obstacle(CPU, torch.float32) or "")
    assert choose_backend("auto", CPU, torch.float32) == "cpu"


@needs_the_kernel
@pytest.mark.usefixtures("unloaded")
def test_a_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "source_id", lambda: build.source_id() + 1)
    assert "another version" in (native.obstacle(CPU, torch.float32) or "")


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_building_replaces_an_older_library(tmp_path: Path) -> None:
    target = tmp_path / "kernels.so"
    target.write_bytes(b"old")
    assert build.build(target) == target
    found = ctypes.CDLL(str(target)).precache_source_id
    found.restype = ctypes.c_uint64
    assert found() == build.source_id()
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_compiler_may_come_with_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "cc -g0")
    assert build.build(tmp_path / "kernels.so").is_file()


def test_building_without_a_compiler_says_so_and_touches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "kernels.so"
    target.write_bytes(b"old")
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(build.BuildError, match="got 'no-such-compiler'"):
        build.build(target)
    assert target.read_bytes() == b"old"


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = tmp_path / "cc"
    failing.write_text("#!/bin/sh\necho no such flag >&2\nexit 3\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CC", str(failing))
    with pytest.raises(build.BuildError, match=r"status 3\nno such flag"):
        build.build(tmp_path / "kernels.so")
    assert list(tmp_path.iterdir()) == [failing]
