"""The parts of the plugin that need no vLLM."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from precache.errors import ConfigError, UnknownPolicyError
from precache.vllm_plugin.adapters import NoFreeSlotError, ResidentAdapters
from precache.vllm_plugin.backends.cpu_plan import MAX_SCRATCH_BLOCKS, make_plan
from precache.vllm_plugin.counters import Counters, take_from
from precache.vllm_plugin.hashing import clear_key, set_key
from precache.vllm_plugin.rejections import find_problems
from precache.vllm_plugin.settings import PLUGIN_POLICIES, PluginSettings, parse_settings
from precache.vllm_plugin.strips import (
    StripMoves,
    move_strips,
    strip_bytes,
    strip_rows,
    strip_view,
    strip_width,
    widen_spec,
    write_strips,
)

# --- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [{}, None, {"other": 1}, object()])
def test_an_engine_that_does_not_ask_gets_nothing(config: object) -> None:
    assert parse_settings(config) is None


def test_the_policy_is_read() -> None:
    assert parse_settings({"precache": {}}) == PluginSettings(PLUGIN_POLICIES["prelrshared"])
    settings = parse_settings({"precache": {"policy": "rebaseshared"}, "other": 1})
    assert settings == PluginSettings(PLUGIN_POLICIES["rebaseshared"])


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"polcy": "nonshared"}, ConfigError),
        ("prelrshared", ConfigError),
        ({"policy": "baseshared"}, UnknownPolicyError),
        ({"policy": 3}, UnknownPolicyError),
        ({"experimental_cuda": "yes"}, ConfigError),
    ],
)
def test_wrong_settings_are_refused(given: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        parse_settings({"precache": given})


# --- what is refused -----------------------------------------------------------------------------


def vllm_config(**changes: Any) -> Any:
    """The fields of a VllmConfig that are looked at, as they are on a CPU with LoRA; `a__b=c` sets a.b."""
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type="cpu"),
        lora_config=SimpleNamespace(
            fully_sharded_loras=False,
            max_loras=3,
            max_cpu_loras=3,
            default_mm_loras=None,
            enable_tower_connector_lora=False,
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=True, cache_dtype="auto"),
        kv_transfer_config=None,
        speculative_config=None,
        model_config=SimpleNamespace(
            model="m",
            runner_type="generate",
            is_encoder_decoder=False,
            use_mla=False,
            is_hybrid=False,
            has_inner_state=False,
            get_sliding_window=lambda: None,
        ),
        parallel_config=SimpleNamespace(enable_dbo=False, worker_cls="auto"),
        scheduler_config=SimpleNamespace(scheduler_cls=None, async_scheduling=False),
    )
    for path, value in changes.items():
        owner, _, name = path.rpartition("__")
        setattr(getattr(config, owner) if owner else config, name, value)
    return config


OFFENDERS: dict[str, dict[str, Any]] = {
    "device": {"device_config__device_type": "cuda"},
    "enable_lora": {"lora_config": None},
    "fully_sharded_loras": {"lora_config__fully_sharded_loras": True},
    "max_cpu_loras": {"lora_config__max_cpu_loras": 8},
    "other modalities": {"lora_config__default_mm_loras": {"image": "x"}},
    "enable_prefix_caching": {"cache_config__enable_prefix_caching": False},
    "kv_cache_dtype": {"cache_config__cache_dtype": "fp8"},
    "kv_sharing_fast_prefill": {"cache_config__kv_sharing_fast_prefill": True},
    "kv_transfer_config": {"kv_transfer_config": object()},
    "runner": {"model_config__runner_type": "pooling"},
    "encoder-decoder": {"model_config__is_encoder_decoder": True},
    "diffusion": {"model_config__is_diffusion": True},
    "latent attention": {"model_config__use_mla": True},
    "hybrid": {"model_config__is_hybrid": True},
    "sliding-window": {"model_config__get_sliding_window": lambda: 128},
    "speculative_config": {"speculative_config": object()},
    "pipeline_parallel_size": {"parallel_config__pipeline_parallel_size": 2},
    "decode_context_parallel_size": {"parallel_config__decode_context_parallel_size": 2},
    "async_scheduling": {"scheduler_config__async_scheduling": True},
    "enable_dbo": {"parallel_config__enable_dbo": True},
    "scheduler_cls": {"scheduler_config__scheduler_cls": "mine.Scheduler"},
    "worker_cls": {"parallel_config__worker_cls": "mine.Worker"},
}


def problems_of(config: Any, policy: str = "prelrshared") -> list[str]:
    return find_problems(config, PluginSettings(PLUGIN_POLICIES[policy]), {"ours.Scheduler"})


def test_a_plain_engine_with_lora_has_no_problem() -> None:
    assert problems_of(vllm_config(scheduler_config__scheduler_cls="ours.Scheduler")) == []


@pytest.mark.parametrize("named", OFFENDERS)
def test_what_the_policy_cannot_run_with_is_named(named: str) -> None:
    (problem,) = problems_of(vllm_config(**OFFENDERS[named]))
    assert named in problem


def test_all_offenders_are_named_at_once() -> None:
    names = [name for name in OFFENDERS if name not in ("enable_lora", "scheduler_cls")]
    changes = {path: value for name in names for path, value in OFFENDERS[name].items()}
    text = "; ".join(problems_of(vllm_config(**changes)))
    assert [name for name in names if name not in text] == []


def test_policies_without_strips_take_sliding_windows() -> None:
    config = vllm_config(model_config__get_sliding_window=lambda: 128)
    assert problems_of(config, "fullshared") == []


def cuda_problems(experimental: bool = True, **changes: Any) -> list[str]:
    ready = {
        "device_config__device_type": "cuda",
        "attention_config": SimpleNamespace(backend=SimpleNamespace(name="TRITON_ATTN")),
        "model_config__enforce_eager": True,
        "use_v2_model_runner": False,
    }
    settings = PluginSettings(PLUGIN_POLICIES["prelrshared"], experimental_cuda=experimental)
    return find_problems(vllm_config(**(ready | changes)), settings, {})


def test_cuda_asks_for_its_opt_in_in_a_sentence() -> None:
    (problem,) = cuda_problems(experimental=False)
    assert "experimental, nobody has run it on a GPU yet" in problem
    assert '"experimental_cuda": true' in problem
    assert parse_settings({"precache": {"experimental_cuda": True}}).experimental_cuda
    assert cuda_problems() == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attention_config": SimpleNamespace(backend=None)}, "--attention-backend TRITON_ATTN"),
        ({"model_config__enforce_eager": False}, "enforce_eager"),
        ({"use_v2_model_runner": True}, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"device_config__device_type": "tpu"}, "device 'tpu'"),
    ],
)
def test_what_the_cuda_backend_cannot_run_with_is_named(
    changes: dict[str, Any], named: str
) -> None:
    (problem,) = cuda_problems(**changes)
    assert named in problem


# --- strips in the page's tail -------------------------------------------------------------------

NUM_BLOCKS, HEADS, BLOCK, DIM, SLOTS, RANK = 5, 2, 4, 8, 3, 2


@dataclass(frozen=True)
class Spec:
    """What is used of vLLM's FullAttentionSpec."""

    block_size: int = BLOCK
    head_size: int = DIM
    dtype: torch.dtype = torch.float32
    page_size_padded: int | None = None

    @property
    def unpadded_page_size_bytes(self) -> int:
        return HEADS * self.block_size * 2 * self.head_size * self.dtype.itemsize


def padded_cache() -> torch.Tensor:
    """A cache as vLLM lays it out for a padded page: [num_blocks, heads, block, 2 * dim], blocks further apart."""
    page = widen_spec(Spec(), SLOTS, RANK).page_size_padded // 4
    raw = torch.zeros(NUM_BLOCKS * page)
    inner = (BLOCK * 2 * DIM, 2 * DIM, 1)
    return raw.as_strided((NUM_BLOCKS, HEADS, BLOCK, 2 * DIM), (page, *inner))


def test_a_page_grows_by_its_strips() -> None:
    assert strip_width(SLOTS, RANK, DIM) == DIM  # six columns, padded to a head
    assert strip_width(SLOTS, 4, DIM) == 12
    assert strip_bytes(widen_spec(Spec(), SLOTS, RANK)) == BLOCK * DIM * 4
    assert strip_bytes(Spec()) == 0


def test_strips_lie_beside_keys_and_values() -> None:
    cache = padded_cache()
    view = strip_view(cache, DIM)
    z = torch.arange(12.0).view(2, 6) + 1
    write_strips(view, z, strip_rows(torch.tensor([BLOCK * 3 + 1, BLOCK * 4]), BLOCK))
    assert torch.equal(view[3, 1, :6], z[0])
    assert torch.equal(view[4, 0, :6], z[1])
    assert int(view.count_nonzero()) == 12
    assert int(cache.count_nonzero()) == 0
    cache.fill_(7.0)
    assert torch.equal(view[3, 1, :6], z[0])


def test_padding_rows_are_not_stored() -> None:
    view = strip_view(padded_cache(), DIM)
    write_strips(view, torch.ones(3, 6), strip_rows(torch.tensor([-1, 2, -1]), BLOCK))
    assert view.nonzero()[:, :2].unique(dim=0).tolist() == [[0, 2]]


def test_a_move_copies_one_slots_columns() -> None:
    view = strip_view(padded_cache(), DIM)
    write_strips(view, torch.ones(2, 6), strip_rows(torch.tensor([0, 5]), BLOCK))
    write_strips(view, torch.full((2, 6), 2.0), strip_rows(torch.tensor([8, 13]), BLOCK))
    move_strips(view, StripMoves(1, torch.tensor([0, 5]), torch.tensor([8, 13])), RANK)
    assert view[2, 0].tolist() == [2, 2, 1, 1, 2, 2, 0, 0]
    assert view[3, 1].tolist() == [2, 2, 1, 1, 2, 2, 0, 0]
    assert view[0, 0].tolist() == [1] * 6 + [0, 0]


# --- how a batch is split ------------------------------------------------------------------------


def plan_of(
    lengths: list[int], seqs: list[int], slots: list[int], decode_apart: bool = True
) -> Any:
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    table = torch.arange(len(seqs) * 8, dtype=torch.int32).view(len(seqs), 8) + 1
    return make_plan(
        starts,
        torch.tensor(seqs, dtype=torch.int32),
        table,
        torch.tensor(slots),
        BLOCK,
        decode_apart,
    )


def test_each_request_is_in_one_part() -> None:
    plan = plan_of([1, 3, 1, 2, 1], [9, 3, 20, 6, 5], [0, -1, 2, 1, -1])
    assert plan.decode.slots.tolist() == [0, 2]
    assert plan.decode.rows.tolist() == [0, 4]
    assert plan.base.rows.tolist() == [1, 2, 3, 7]
    assert plan.base.query_start_loc.tolist() == [0, 3, 4]
    assert plan.base.seq_lens.tolist() == [3, 5]
    (scratch,) = plan.expanded
    assert scratch.part.rows == slice(5, 7)
    assert plan_of([1, 1], [9, 9], [0, 1], decode_apart=False).decode is None


def test_scratch_pages_are_the_distinct_pairs_of_slot_and_block() -> None:
    lengths, seqs, slots = [2, 2, 2], [6, 6, 6], [1, 1, 2]
    plan = plan_of(lengths, seqs, slots)
    (scratch,) = plan.expanded
    assert scratch.blocks.tolist() == [1, 2, 9, 10, 17, 18]
    assert scratch.slots.tolist() == [1, 1, 1, 1, 2, 2]
    assert scratch.part.block_table[:, :2].tolist() == [[0, 1], [2, 3], [4, 5]]


def test_the_scratch_is_bounded() -> None:
    per_request = MAX_SCRATCH_BLOCKS // 2
    seqs = [per_request * BLOCK] * 3
    table = torch.arange(3 * per_request, dtype=torch.int32).view(3, per_request)
    starts = torch.tensor([0, 2, 4, 6], dtype=torch.int32)
    plan = make_plan(
        starts, torch.tensor(seqs, dtype=torch.int32), table, torch.tensor([0, 0, 0]), BLOCK, True
    )
    assert [len(scratch.blocks) for scratch in plan.expanded] == [2 * per_request, per_request]


# --- which adapters are resident -----------------------------------------------------------------


class Workers:
    """An executor that remembers what it was told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.broken = False

    def add_lora(self, request: Any) -> bool:
        if self.broken:
            raise RuntimeError("no such adapter")
        self.calls.append(("load again" if request.load_inplace else "load", request.lora_int_id))
        return True

    def remove_lora(self, lora_id: int) -> bool:
        self.calls.append(("remove", lora_id))
        return True


def lora(number: int, path: str = "somewhere", inplace: bool = False) -> Any:
    return SimpleNamespace(
        lora_int_id=number, lora_name=f"a{number}", lora_path=path, load_inplace=inplace
    )


def residents(policy: str = "fullshared", slots: int = 2, in_use: Any = ()) -> Any:
    changes: list[int] = []
    adapters = ResidentAdapters(
        PLUGIN_POLICIES[policy], slots, lambda: in_use, lambda: changes.append(1)
    )
    adapters.executor = Workers()
    return adapters, adapters.executor, changes


def test_a_new_resident_set_is_a_new_generation() -> None:
    adapters, workers, changes = residents()
    keys = [adapters.cache_key(None)]
    for change in (
        lambda: adapters.load(workers, lora(1)),
        lambda: adapters.load(workers, lora(1, inplace=True)),
        lambda: adapters.load(workers, lora(1, path="elsewhere")),
        lambda: adapters.remove(workers, 1),
        lambda: adapters.load(workers, lora(1)),
    ):
        change()
        keys.append(adapters.cache_key(None))
    assert len(set(keys)) == len(keys)
    assert len(changes) == 5
    assert [call for call, _ in workers.calls] == [
        "load",
        "load again",
        "load again",
        "remove",
        "load",
    ]
    assert adapters.load(workers, lora(1))
    assert adapters.cache_key(None) == keys[-1]


def test_nonshared_tells_adapters_and_their_versions_apart() -> None:
    adapters, workers, _ = residents("nonshared")
    adapters.load(workers, lora(1))
    adapters.load(workers, lora(2))
    keys = [adapters.cache_key(request) for request in (None, lora(1), lora(2))]
    assert len(set(keys)) == 3
    adapters.load(workers, lora(1, inplace=True))
    assert adapters.cache_key(lora(2)) == keys[2]
    assert adapters.cache_key(lora(1)) not in keys


def test_the_least_recently_used_idle_adapter_makes_room() -> None:
    in_use = {1}
    adapters, workers, _ = residents(slots=2, in_use=in_use)
    adapters.load(workers, lora(1))
    adapters.load(workers, lora(2))
    adapters.admit(lora(1))
    adapters.load(workers, lora(3))
    assert workers.calls[-2:] == [("remove", 2), ("load", 3)]
    assert adapters.holds(lora(1))
    assert not adapters.holds(lora(2))


def test_adapters_in_use_stay() -> None:
    in_use = {1, 2}
    adapters, workers, _ = residents(slots=2, in_use=in_use)
    adapters.load(workers, lora(1))
    adapters.load(workers, lora(2))
    with pytest.raises(NoFreeSlotError, match="a3"):
        adapters.load(workers, lora(3))
    assert not adapters.admit(lora(3))
    in_use.clear()
    assert adapters.admit(lora(3))


def test_an_adapter_that_did_not_load_is_not_there() -> None:
    adapters, workers, _ = residents()
    adapters.load(workers, lora(1))
    before = adapters.cache_key(None)
    workers.broken = True
    with pytest.raises(RuntimeError, match="no such adapter"):
        adapters.load(workers, lora(1, inplace=True))
    assert not adapters.holds(lora(1))
    assert adapters.cache_key(None) != before


# --- hashes and counters -------------------------------------------------------------------------


class Request:
    """What is used of vLLM's Request."""

    def __init__(self, token_ids: list[int], lora_request: Any = None, cache_salt: Any = None):
        self.all_token_ids = token_ids
        self.lora_request = lora_request
        self.cache_salt = cache_salt
        self.block_hashes: list[str] = []
        self._block_hasher: Callable[[Any], list[str]] | None = None

    def update_block_hashes(self) -> None:
        if self._block_hasher is not None:
            self.block_hashes.extend(self._block_hasher(self))


def stock_hasher(request: Any) -> list[str]:
    """Chained, with adapter and salt in the first block, as vLLM does it."""
    text = f"{request.lora_request}{request.cache_salt}"
    hashes = []
    for start in range(len(request.block_hashes), len(request.all_token_ids) // BLOCK):
        text += str(request.all_token_ids[start * BLOCK : (start + 1) * BLOCK])
        hashes.append(hashlib.sha256(text.encode()).hexdigest())
    return hashes


def hashes(key: str, **request: Any) -> list[str]:
    made = Request(list(range(9)), **request)
    set_key(made, stock_hasher, key)
    assert len(made.block_hashes) == 2
    return made.block_hashes


def test_the_key_takes_the_place_of_the_adapter() -> None:
    assert hashes("one", lora_request="plan") == hashes("one", lora_request="action")
    assert hashes("one")[0] != hashes("two")[0]
    assert hashes("one", cache_salt="mine")[0] != hashes("one")[0]
    # no key can look like another key with a salt
    assert hashes("one", cache_salt="x")[0] != hashes("one/x")[0]


def test_a_request_without_a_key_has_no_hashes() -> None:
    request = Request(list(range(9)))
    set_key(request, stock_hasher, "one")
    first = request.block_hashes
    set_key(request, stock_hasher, "one")
    assert request.block_hashes is first
    clear_key(request)
    request.update_block_hashes()
    assert request.block_hashes == []


def test_counters_travel_in_vllms_statistics_and_leave_no_trace() -> None:
    stats = SimpleNamespace(num_kv_fetch_reqs_by_stage={"waiting": 2})
    assert take_from(stats) is None
    counters = Counters(strip_bytes=7, reused_tokens=3)
    counters.put_into(stats)
    assert take_from(stats) == counters
    assert stats.num_kv_fetch_reqs_by_stage == {"waiting": 2}


def test_the_entry_points_are_what_pyproject_says() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'precache = "precache.vllm_plugin:register"' in text
    assert 'precache = "precache.vllm_plugin.metrics:SharingStatLogger"' in text
