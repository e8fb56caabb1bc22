"""The policies that recompute a part: budget, exact masks, what equals what, counts, and what goes wrong."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from precache import Engine, EngineConfig
from precache.engine.policies import make_policy
from precache.engine.policies.profile import RecomputeProfile, load_profile
from precache.errors import CacheFileError, ConfigError, NonFiniteLogitsError, TurnCancelledError
from precache.fidelity.cost import CostMeter
from tests.engine.setup import LAYERS, SHARE, Setup
from tests.engine.trajectories import (
    CONTROLS,
    NOTICEABLE,
    REUSED,
    SELECTIVE,
    STEPS,
    TOLERANCE,
    answer,
    difference,
    only_trajectory,
    play_engine,
    play_reference,
    stored,
    tokens,
)

ALL = (*SELECTIVE, *(policy for policy, _ in CONTROLS))
PROMPT = tokens(40)
NUM_LAYERS = 4


def refreshed(
    engine: Engine, agent: str, prompt: list[int]
) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
    """What was stored of plan's tokens before and after another agent's turn over them, and that turn's usage."""
    engine.score("plan", prompt, tokens(1))
    trajectory = only_trajectory(engine)
    before = {name: part[:, : len(prompt)] for name, part in stored(engine, trajectory).items()}
    out = engine.generate(agent, [*prompt, 11, 12], max_tokens=2, ignore_eos=True)
    after = {name: part[:, : len(prompt)] for name, part in stored(engine, trajectory).items()}
    return before, after, out.usage


def changed_rows(before: dict[str, Tensor], after: dict[str, Tensor], layer: int) -> set[int]:
    changed = [
        (before[f"{kind}.{layer}"] != after[f"{kind}.{layer}"]).any(dim=-1).any(dim=0)
        for kind in ("k", "v")
    ]
    return set(torch.nonzero(changed[0] | changed[1]).flatten().tolist())


# -- definition ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("policy", [policy for policy, _ in CONTROLS])
def test_the_random_controls_follow_their_definition(llama: Setup, policy: str, seed: int) -> None:
    played = play_engine(llama.engine(policy, recompute_seed=seed, prefill_chunk=4))
    other = play_engine(llama.engine(policy, recompute_seed=seed + 1))
    expected = play_reference(llama.reference(policy, seed=seed))
    assert difference(played.logits, expected) < TOLERANCE
    assert difference(other.logits, expected) > NOTICEABLE
    assert played.cached == REUSED


@pytest.mark.parametrize("policy", SELECTIVE)
def test_refreshing_again_what_others_overwrote_follows_its_definition(
    llama: Setup, policy: str
) -> None:
    engine = llama.engine(policy, recompute_again=True, prefill_chunk=5)
    played = play_engine(engine)
    expected = play_reference(llama.reference(policy, again=True))
    assert difference(played.logits, expected) < TOLERANCE
    assert difference(played.logits, llama.expected(policy)) > NOTICEABLE
    once = llama.engine(policy)
    play_engine(once)
    assert engine.stats().refreshed_kv_entries > once.stats().refreshed_kv_entries


@pytest.mark.parametrize("share", [0.3, 0.45, 0.75])
@pytest.mark.parametrize("policy", ALL)
def test_the_default_layers_follow_their_definition(
    llama: Setup, policy: str, share: float
) -> None:
    """Without a profile, and on more than one share."""
    engine = llama.engine(policy, recompute_share=share, recompute_profile=None)
    played = play_engine(engine)
    layers = {"layers": [0, 3]} if policy == "droidspeak-scattered" else {"layers": None}
    if policy == "droidspeak-scattered":
        layers = {"layers": {0.3: [0], 0.45: [0], 0.75: [0, 2, 3]}[share]}
    settings = {"span": None} if policy == "relaycaching" else layers
    expected = play_reference(llama.reference(policy, share=share, **settings))
    assert difference(played.logits, expected) < TOLERANCE
    assert played.cached == REUSED
    assert engine.stats().refreshed_kv_entries > 0


# -- both ends of the budget ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ALL)
def test_a_share_of_nothing_is_fullshared_to_the_bit(llama: Setup, policy: str) -> None:
    engine, full = llama.engine(policy, recompute_share=0), llama.engine("fullshared")
    ours, theirs = play_engine(engine), play_engine(full)
    assert all(torch.equal(a, b) for a, b in zip(ours.logits, theirs.logits, strict=True))
    assert ours.cached == REUSED
    assert engine.stats().refreshed_kv_entries == engine.stats().recomputed_token_layers == 0
    assert engine.stats().bytes_held == full.stats().bytes_held


@pytest.mark.parametrize("policy", ALL)
def test_a_share_of_everything_again_and_again_is_nonshared(llama: Setup, policy: str) -> None:
    """Every turn of every agent: all that another agent's pass has written since is replaced first."""
    engine = llama.engine(
        policy, recompute_share=1, recompute_again=True, recompute_profile=None, prefill_chunk=6
    )
    played = play_engine(engine)
    assert difference(played.logits, llama.expected("nonshared")) < TOLERANCE
    assert difference(played.logits, llama.expected("fullshared")) > NOTICEABLE
    assert played.cached == REUSED


@pytest.mark.parametrize("policy", ALL)
def test_a_share_of_everything_once_is_nonshared_until_an_agent_returns(
    llama: Setup, policy: str
) -> None:
    """An agent's first turn is exact; when it comes back, its old tokens are those of whoever refreshed them since."""
    played = play_engine(llama.engine(policy, recompute_share=1, recompute_profile=None))
    expected = llama.expected("nonshared")
    first, returns = (0, 1, 2, 4), (3, 5, 6)  # turns of STEPS
    assert difference([played.logits[i] for i in first], [expected[i] for i in first]) < TOLERANCE
    for turn in returns:
        assert difference([played.logits[turn]], [expected[turn]]) > NOTICEABLE


# -- budget and masks ----------------------------------------------------------------------------------------------

# policy -> (layers that all rows go through, layers that chosen rows go through, chosen rows of 40)
ROWS: dict[str, tuple[list[int], list[int], int]] = {
    "droidspeak": ([1, 2], [], 0),
    "droidspeak-scattered": ([1, 3], [], 0),
    "cacheblend": ([0], [1, 2, 3], 18),  # (0.6 * 4 - 1) / 3 of 40 = 18.67
    "relaycaching": ([1], [2, 3], 28),  # (0.6 * 4 - 1) / 2 of 40
    "random-tokens": ([0], [1, 2, 3], 18),
}


@pytest.mark.parametrize("policy", ROWS)
def test_exactly_the_chosen_rows_of_the_chosen_layers_are_replaced(
    llama: Setup, policy: str
) -> None:
    before, after, usage = refreshed(llama.engine(policy), "action", PROMPT)
    everywhere, some, count = ROWS[policy]
    chosen = [changed_rows(before, after, layer) for layer in some]
    for layer in range(NUM_LAYERS):
        rows = changed_rows(before, after, layer)
        if layer in everywhere:
            assert len(rows) == len(PROMPT)
        elif layer in some:
            assert len(rows) == count
            assert rows == chosen[0]
        else:
            assert not rows
    entries = len(everywhere) * len(PROMPT) + len(some) * count
    assert usage.refreshed_kv_entries == entries <= SHARE * NUM_LAYERS * len(PROMPT)
    assert usage.catch_up_tokens == len(PROMPT)


@pytest.mark.parametrize("policy", ALL)
def test_a_token_is_refreshed_once_per_reader(llama: Setup, policy: str) -> None:
    engine = llama.engine(policy)
    played = play_engine(engine)
    before = engine.stats().refreshed_kv_entries
    prompt = [*played.token_ids, 30]
    first = engine.generate("plan", prompt, max_tokens=1)
    again = engine.generate("plan", [*prompt, *first.token_ids, 31], max_tokens=1)
    assert first.usage.refreshed_kv_entries == engine.stats().refreshed_kv_entries - before > 0
    assert again.usage.refreshed_kv_entries == again.usage.catch_up_flops == 0


def test_the_scores_choose_other_rows_than_chance(llama: Setup) -> None:
    rows = []
    for policy in ("cacheblend", "random-tokens"):
        before, after, _ = refreshed(llama.engine(policy), "action", PROMPT)
        rows.append(changed_rows(before, after, 2))
    assert rows[0] != rows[1]


def test_hidden_states_are_kept_only_where_a_group_starts_behind_the_embeddings(
    llama: Setup,
) -> None:
    base = llama.engine("fullshared", growth_tokens=16)
    plain = llama.engine("droidspeak", growth_tokens=16, recompute_profile=None)
    kept = llama.engine("droidspeak", growth_tokens=16)
    for engine in (base, plain, kept):
        engine.score("plan", PROMPT, tokens(1))
    rows, hidden, float32 = 48, 64, 4
    assert plain.stats().bytes_held == base.stats().bytes_held
    assert kept.stats().bytes_held == base.stats().bytes_held + rows * hidden * float32
    strips = kept.sessions()[0].strips
    assert [strip.bytes for strip in strips if strip.readers == ("plan",)] == [0]


# -- counts --------------------------------------------------------------------------------------------------------

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, RANK = 64, 4, 2, 16, 96, 4


def layer_flops(rows: int, seen: int) -> int:
    """A whole layer of the tiny llama with LoRA on q and v: by hand."""
    q = HIDDEN * HEADS * HEAD_DIM + RANK * (HIDDEN + HEADS * HEAD_DIM)
    rest = HEADS * HEAD_DIM * HIDDEN + 3 * HIDDEN * INNER
    return kv_flops(rows) + 2 * rows * (q + rest) + 4 * HEADS * HEAD_DIM * seen


def kv_flops(rows: int) -> int:
    width = KV_HEADS * HEAD_DIM
    return 2 * rows * (2 * HIDDEN * width + RANK * (HIDDEN + width))


def test_flops_are_counted_as_by_hand(llama: Setup) -> None:
    usage = refreshed(llama.engine("droidspeak"), "action", PROMPT)[2]
    rows, seen = len(PROMPT), len(PROMPT) * (len(PROMPT) + 1) // 2
    assert usage.catch_up_flops == layer_flops(rows, seen) + kv_flops(rows)
    assert usage.recomputed_token_layers == rows
    # Its own tokens: two of the prompt, of which the last layer runs one, and one that was said and run.
    new = sum(layer_flops(1, 41 + i) for i in range(3)) * NUM_LAYERS
    new -= layer_flops(1, 41) - kv_flops(1)
    new += 2 * 2 * HIDDEN * 128  # the head
    assert usage.flops == usage.catch_up_flops + new


@pytest.mark.parametrize(
    "policy", ["droidspeak", "droidspeak-scattered", "cacheblend", "random-tokens"]
)
def test_flops_are_those_of_the_products_that_run(llama: Setup, policy: str) -> None:
    """Against what torch dispatches, counted from outside."""
    engine = llama.engine(policy)
    with CostMeter(engine) as meter:
        play_engine(engine)
        cost = meter.cost()
    assert engine.stats().flops == cost.flops
    assert engine.stats().catch_up_flops > 0


def test_passes_over_cached_tokens_are_counted_for_every_policy(llama: Setup) -> None:
    counts = {}
    for policy in ("nonshared", "fullshared", "baseshared", "prelrshared", "rebaseshared"):
        engine = llama.engine(policy)
        played = play_engine(engine)
        out = engine.generate("reflect", [*played.token_ids, 30], max_tokens=1)
        counts[policy] = out.usage
        assert engine.stats().flops > out.usage.flops > 0
        assert out.usage.refreshed_kv_entries == 0
    assert counts["baseshared"].catch_up_flops == 0  # reflect has been over everything
    assert counts["prelrshared"].flops > counts["fullshared"].flops
    assert counts["rebaseshared"].flops > counts["prelrshared"].flops
    engine = llama.engine("baseshared")
    prompt = play_engine(engine, STEPS[:2]).token_ids
    usage = engine.generate("reflect", prompt, max_tokens=1).usage
    assert usage.catch_up_tokens == 26
    assert usage.recomputed_token_layers == 26 * (NUM_LAYERS - 1)  # of the last only X A
    assert usage.refreshed_kv_entries == 0 < usage.catch_up_flops < usage.flops


# -- what goes wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", SELECTIVE)
def test_an_adapter_that_overflows_costs_the_rows_it_wrote_and_harms_nobody(
    llama: Setup, policy: str
) -> None:
    state = llama.reference(policy)
    adapters = llama.adapters() | {"broken": llama.other_adapter(5, std=1e37)}
    with llama.engine(policy, None, adapters) as engine:
        prompt = play_engine(engine, STEPS[:3]).token_ids
        for _ in range(2):
            with pytest.raises(NonFiniteLogitsError, match="'broken'"):
                engine.generate("broken", [*prompt, 30], max_tokens=5)
            assert not engine.sessions()
        for agent in ("action", "reflect"):
            logits = engine.score(agent, prompt, tokens(2))
            assert difference([logits], [answer(state, agent, prompt, tokens(2))]) < TOLERANCE
            prompt = [*prompt, *tokens(2), 30]


@pytest.mark.parametrize("policy", SELECTIVE)
def test_a_turn_that_is_cancelled_while_it_refreshes_leaves_a_valid_state(
    llama: Setup, policy: str
) -> None:
    state = llama.reference(policy)
    play_reference(state, STEPS[:2])
    with llama.engine(policy, prefill_chunk=4) as engine:
        prompt = [*play_engine(engine, STEPS[:2]).token_ids, 30]
        cancel = CancelledAfter(checks=2)
        with pytest.raises(TurnCancelledError):
            list(engine.stream("reflect", prompt, max_tokens=2, cancel=cancel))
        # Without a choice of rows every chunk is done when the next one starts; with one the refresh is a whole.
        held = 26 if policy.startswith("droidspeak") else 0
        assert [session.length for session in engine.sessions()] == [held] * bool(held)
        state.catch_up("reflect", min(8, held))
        state.truncate(held)
        logits = engine.score("action", prompt, tokens(2))
    assert difference([logits], [answer(state, "action", prompt, tokens(2))]) < TOLERANCE


class CancelledAfter(threading.Event):
    """An event that is set once it has been asked so many times."""

    def __init__(self, checks: int) -> None:
        super().__init__()
        self._left = checks

    def is_set(self) -> bool:
        self._left -= 1
        return self._left < 0


def test_a_session_with_other_layers_is_refused(llama: Setup, tmp_path: Path) -> None:
    engine = llama.engine("droidspeak")
    play_engine(engine)
    engine.save_session("session-1", tmp_path / "s")
    for settings in ({"recompute_profile": None}, {"recompute_share": 0}):
        other = llama.engine("droidspeak", **settings)
        with pytest.raises(CacheFileError, match="policy is 'droidspeak .*first=1, last=2"):
            other.load_session(tmp_path / "s")
        assert not other.sessions()


def write(path: Path, **changes: object) -> Path:
    facts: dict[str, object] = {
        "format": "precache-recompute-1",
        "num_layers": 4,
        "policies": LAYERS,
    }
    path.write_text(json.dumps(facts | changes))
    return path


RELAY = {"start": 1, "detection": 2, "end": 3}
WRONG_PROFILES: dict[str, dict[str, object]] = {
    "format": {"format": "x"},
    "fields": {"more": 1},
    "num_layers": {"num_layers": 0},
    "made_by": {"made_by": 3},
    "policies": {"policies": {"fullshared": {}}},
    "droidspeak: .*fields": {"policies": {"droidspeak": {"layer": [1]}}},
    "droidspeak.layers: .*a list": {"policies": {"droidspeak": {"layers": []}}},
    "droidspeak: .*layers from 0 to 3": {"policies": {"droidspeak": {"layers": [3, 4]}}},
    "droidspeak: .*layers from 0 to 3 ": {"policies": {"droidspeak": {"layers": [True]}}},
    "droidspeak.layers: .*consecutive": {"policies": {"droidspeak": {"layers": [0, 2]}}},
    "droidspeak-scattered.layers: .*ascending": {
        "policies": {"droidspeak-scattered": {"layers": [2, 0]}}
    },
    "relaycaching: .*start < detection": {"policies": {"relaycaching": RELAY | {"start": 2}}},
}


@pytest.mark.parametrize("match", WRONG_PROFILES)
def test_a_profile_that_is_wrong_is_refused_by_name(tmp_path: Path, match: str) -> None:
    path = write(tmp_path / "p.json", **WRONG_PROFILES[match])
    with pytest.raises(ConfigError, match=match.strip()):
        make_policy("droidspeak", None, EngineConfig(recompute_profile=path))


def test_a_file_that_is_no_profile_is_refused(tmp_path: Path) -> None:
    for spoil in (b"{", b"[" * (2 << 20), b"\xff\xfe"):
        (tmp_path / "p").write_bytes(spoil)
        with pytest.raises(ConfigError, match="recompute_profile"):
            load_profile(tmp_path / "p")
    with pytest.raises(ConfigError, match="a readable file"):
        load_profile(tmp_path / "none")


def test_a_profile_of_another_model_or_over_the_budget_is_refused_at_load(
    llama: Setup, tmp_path: Path
) -> None:
    cases: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
        "made for 5 layers.*the model's 4": (
            "droidspeak",
            lambda: {"recompute_profile": write(tmp_path / "a", num_layers=5)},
        ),
        "'2 layers', allowed is at most 1": ("droidspeak", lambda: {"recompute_share": 0.3}),
        "'1 layers before the detection'": ("relaycaching", lambda: {"recompute_share": 0.2}),
    }
    for match, (policy, settings) in cases.items():
        with pytest.raises(ConfigError, match=match):
            llama.engine(policy, **settings())


def test_a_profile_is_written_as_it_is_read(tmp_path: Path) -> None:
    profile = RecomputeProfile(4, LAYERS, {"share": 0.5})
    profile.save(tmp_path / "p")
    assert load_profile(tmp_path / "p") == profile
    with pytest.raises(ConfigError, match="layers from 0 to 1"):
        RecomputeProfile(2, LAYERS).save(tmp_path / "q")
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize(
    "setting",
    [
        {"recompute_share": -0.1},
        {"recompute_share": 1.5},
        {"recompute_share": True},
        {"recompute_share": float("nan")},
        {"recompute_seed": -1},
        {"recompute_seed": 0.5},
    ],
)
def test_settings_out_of_range_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        EngineConfig(**setting)
