"""The reference must be right before anything is measured by it.

Against stock transformers and PEFT where those define the answer, by hand where they do not, and
always beside a check that the wrong answer would have been noticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from itertools import combinations
from pathlib import Path

import peft
import pytest
import torch
import transformers
from torch import Tensor

from tests.reference.forward import Network, Pass
from tests.reference.lora import ALL_LINEAR, QKVO, QV, AdapterDict, make_adapter, read_adapter
from tests.reference.models import MODEL_KINDS, VOCAB_SIZE, save_tiny, tiny_model, tiny_tokenizer
from tests.reference.policies import POLICIES, ReferenceState

TOLERANCE = 1e-4  # fp32 on a CPU
NOTICEABLE = 0.1  # hundreds of times the rounding; the tiny adapters are strong

Turn = tuple[str | None, list[int]]


def random_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(8, VOCAB_SIZE, (count,), generator=generator).tolist()


# Every agent follows every other one; the last turn is the one whose logits are compared.
TRAJECTORY: list[Turn] = [
    ("plan", random_tokens(11, seed=1)),
    ("action", random_tokens(9, seed=2)),
    (None, random_tokens(5, seed=3)),
    ("plan", random_tokens(1, seed=4)),
    ("action", random_tokens(8, seed=5)),
]


class Workshop:
    """Model and adapter folders, each written once and read as a user would read them."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def model_folder(self, kind: str) -> Path:
        folder = self._root / kind
        return folder if folder.exists() else save_tiny(kind, folder)

    def adapter_folder(self, kind: str, name: str, **options: object) -> Path:
        digest = hashlib.sha256(repr(sorted(options.items())).encode()).hexdigest()
        folder = self._root / f"{kind}-{name}-{digest}"
        if not folder.exists():
            make_adapter(self.model_folder(kind), folder, **options)
        return folder

    def adapter(self, kind: str, name: str, **options: object) -> AdapterDict:
        return read_adapter(self.adapter_folder(kind, name, **options))

    def pair(self, kind: str, **options: object) -> dict[str, AdapterDict]:
        """Two adapters that have nothing in common but their shape."""
        return {
            "plan": self.adapter(kind, "plan", seed=10, **options),
            "action": self.adapter(kind, "action", seed=20, **options),
        }

    def pair_with_common_a(self, kind: str, **options: object) -> dict[str, AdapterDict]:
        source = self.adapter_folder(kind, "plan", seed=10, **options)
        return {
            "plan": read_adapter(source),
            "action": self.adapter(kind, "common", seed=20, share_a_with=source, **options),
        }


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("workshop"))


@cache
def model_of(kind: str) -> transformers.PreTrainedModel:
    """One model a kind for all tests: nobody writes to it."""
    return tiny_model(kind)


@pytest.fixture
def llama() -> transformers.PreTrainedModel:
    return model_of("llama")


def play(state: ReferenceState, turns: Iterable[Turn]) -> list[Tensor]:
    return [state.turn(agent, tokens) for agent, tokens in turns]


def distance(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape
    return float((one - other).abs().max())


@torch.no_grad()
def stock_logits(model: torch.nn.Module, tokens: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([tokens])).logits[0]


def own_pass(model: transformers.PreTrainedModel, adapter: AdapterDict, tokens: list[int]) -> Pass:
    """The exact pass of one adapter over a whole sequence, with no cache at all."""
    network = Network(model)
    return network.run(
        tokens,
        0,
        adapter,
        lambda layer, x: (network.keys(layer, x, 0, adapter), network.values(layer, x, adapter)),
    )


# --- the network itself ------------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_without_adapters_every_policy_is_stock_transformers(kind: str, policy: str) -> None:
    model, tokens = model_of(kind), random_tokens(40, seed=0)
    state = ReferenceState(model, {}, policy)
    turns = [(None, tokens[:20]), (None, tokens[20:21]), (None, tokens[21:])]
    assert distance(torch.cat(play(state, turns)), stock_logits(model, tokens)) < TOLERANCE


@pytest.mark.parametrize("kind", ["mistral_swa", "ministral", "gemma2", "gemma3"])
def test_the_tiny_windows_matter(kind: str) -> None:
    model, tokens = model_of(kind), random_tokens(40, seed=0)
    windowed = stock_logits(model, tokens)
    network = Network(model)
    network._window = lambda layer: None  # type: ignore[method-assign]
    unlimited = network.run(
        tokens,
        0,
        {},
        lambda layer, x: (network.keys(layer, x, 0, {}), network.values(layer, x, {})),
    ).logits
    assert distance(unlimited[:7], windowed[:7]) < TOLERANCE
    assert distance(unlimited, windowed) > 0.5


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_saved_model_and_tokenizer_load_as_a_user_loads_them(kind: str, workshop: Workshop) -> None:
    folder, tokens = workshop.model_folder(kind), random_tokens(20, seed=0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    assert distance(stock_logits(model, tokens), stock_logits(model_of(kind), tokens)) == 0.0
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "Plan: a  b\n\tαβ!"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert rendered == "<s><|user|>hi</s>\n"


def test_every_token_id_decodes() -> None:
    tokenizer = tiny_tokenizer(add_bos=True)
    assert len(tokenizer) == VOCAB_SIZE
    assert all(tokenizer.decode([token_id]) for token_id in range(VOCAB_SIZE))
    assert len(tokenizer("α", add_special_tokens=False).input_ids) == 2
    assert tokenizer("a").input_ids[0] == tokenizer.bos_token_id


# --- adapters ----------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [QV, QKVO, ALL_LINEAR], ids=["qv", "qkvo", "all"])
@pytest.mark.parametrize("kind", ["llama", "ministral", "qwen2", "gemma2"])
def test_nonshared_is_transformers_with_peft(
    kind: str, targets: tuple[str, ...], workshop: Workshop
) -> None:
    folders = {
        "plan": workshop.adapter_folder(kind, "plan", seed=10, targets=targets),
        "action": workshop.adapter_folder(kind, "action", seed=20, targets=targets),
    }
    adapters = {name: read_adapter(folder) for name, folder in folders.items()}
    state = ReferenceState(model_of(kind), adapters, "nonshared")
    stock = peft_model(tiny_model(kind), folders)
    base = stock_logits(model_of(kind), [t for _, tokens in TRAJECTORY for t in tokens])
    for agent, tokens in TRAJECTORY:
        logits = state.turn(agent, tokens)
        expected = peft_logits(stock, agent, state.tokens)[-len(tokens) :]
        assert distance(logits, expected) < TOLERANCE
        start = len(state.tokens) - len(tokens)
        if agent is not None:
            assert distance(logits, base[start : len(state.tokens)]) > 0.1


@pytest.mark.parametrize(
    "options",
    [
        {"rslora": True},
        {"rank_pattern": {"v_proj": 2, "layers.1.self_attn.q_proj": 6}},
        {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"layers.2.self_attn.v_proj": 3}},
        {"layers_to_transform": [1, 3], "rank": 3, "alpha": 5},
    ],
    ids=["rslora", "rank-pattern", "alpha-pattern", "some-layers"],
)
def test_adapter_folders_are_read_as_peft_reads_them(
    options: dict[str, object], workshop: Workshop, llama: transformers.PreTrainedModel
) -> None:
    folder = workshop.adapter_folder("llama", "special", **options)
    tokens = random_tokens(24, seed=0)
    stock = peft_model(tiny_model("llama"), {"special": folder})
    logits = own_pass(llama, read_adapter(folder), tokens).logits
    assert distance(logits, peft_logits(stock, "special", tokens)) < TOLERANCE
    assert distance(logits, stock_logits(llama, tokens)) > 0.1


def test_common_a_is_bitwise_common_and_only_where_asked(workshop: Workshop) -> None:
    adapters = workshop.pair_with_common_a("llama", targets=QKVO)
    plan, action = adapters["plan"], adapters["action"]
    for layer, target in plan:
        is_same = torch.equal(plan[layer, target].a, action[layer, target].a)
        assert is_same == (target in ("k_proj", "v_proj"))
        assert not torch.equal(plan[layer, target].b, action[layer, target].b)


def peft_model(
    base: transformers.PreTrainedModel, folders: dict[str, Path]
) -> peft.PeftMixedModel | peft.PeftModel:
    (first, first_folder), *others = folders.items()
    model = peft.PeftModel.from_pretrained(base, first_folder, adapter_name=first)
    for name, folder in others:
        model.load_adapter(folder, adapter_name=name)
    return model.eval()


def peft_logits(model: peft.PeftModel, agent: str | None, tokens: list[int]) -> Tensor:
    if agent is None:
        with model.disable_adapter():
            return stock_logits(model, tokens)
    model.set_adapter(agent)
    return stock_logits(model, tokens)


# --- where policies must agree -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "targets"), [("llama", QV), ("llama", QKVO), ("gemma2", ALL_LINEAR)]
)
@pytest.mark.parametrize("policy", ["fullshared", "baseshared", "prelrshared", "baselrshared"])
def test_own_tokens_are_exact(
    kind: str, targets: tuple[str, ...], policy: str, workshop: Workshop
) -> None:
    model, adapters = model_of(kind), workshop.pair_with_common_a(kind, targets=targets)
    turns = [("plan", tokens) for _, tokens in TRAJECTORY]
    state, exact = (ReferenceState(model, adapters, name) for name in (policy, "nonshared"))
    for logits, expected in zip(play(state, turns), play(exact, turns), strict=True):
        assert distance(logits, expected) < TOLERANCE
    for side in (0, 1):  # keys, values
        for seen, own in zip(state.seen_by("plan")[side], exact.seen_by("plan")[side], strict=True):
            assert distance(seen, own) < TOLERANCE


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_zero_adapters_change_nothing(
    policy: str, workshop: Workshop, llama: transformers.PreTrainedModel
) -> None:
    adapters = workshop.pair_with_common_a("llama", targets=ALL_LINEAR, std=0.0)
    state = ReferenceState(llama, adapters, policy)
    logits = torch.cat(play(state, TRAJECTORY))
    assert distance(logits, stock_logits(llama, state.tokens)) < TOLERANCE


@pytest.mark.parametrize("policy", ["fullshared", "baseshared", "prelrshared", "baselrshared"])
def test_two_names_for_the_same_weights_are_one_agent(
    policy: str, workshop: Workshop, llama: transformers.PreTrainedModel
) -> None:
    twin = workshop.pair("llama", targets=QKVO)["plan"]
    adapters = {"plan": twin, "action": twin}
    turns = [(agent or "plan", tokens) for agent, tokens in TRAJECTORY]
    logits = play(ReferenceState(llama, adapters, policy), turns)
    expected = play(ReferenceState(llama, adapters, "nonshared"), turns)
    assert distance(torch.cat(logits), torch.cat(expected)) < TOLERANCE


@pytest.mark.parametrize("targets", [QV, ALL_LINEAR], ids=["qv", "all"])
@pytest.mark.parametrize("policy", ["baseshared", "prelrshared", "rebaseshared"])
def test_one_layer_model_is_exact_because_all_writers_see_the_same_x(
    targets: tuple[str, ...], policy: str, tmp_path: Path
) -> None:
    folder = save_tiny("llama", tmp_path / "model", num_layers=1)
    adapters = {
        name: read_adapter(make_adapter(folder, tmp_path / name, targets=targets, seed=seed))
        for seed, name in enumerate(("plan", "action"))
    }
    model = tiny_model("llama", num_layers=1)
    logits = play(ReferenceState(model, adapters, policy), TRAJECTORY)
    expected = play(ReferenceState(model, adapters, "nonshared"), TRAJECTORY)
    full = play(ReferenceState(model, adapters, "fullshared"), TRAJECTORY)
    assert distance(torch.cat(logits), torch.cat(expected)) < TOLERANCE
    assert distance(torch.cat(full), torch.cat(expected)) > NOTICEABLE


@pytest.mark.parametrize("policy", ["baseshared", "prelrshared", "rebaseshared"])
def test_first_layer_of_the_cache_by_hand(
    policy: str, workshop: Workshop, llama: transformers.PreTrainedModel
) -> None:
    adapters = workshop.pair("llama")
    state = ReferenceState(llama, adapters, policy)
    play(state, TRAJECTORY)
    layer = llama.model.layers[0]
    x = layer.input_layernorm(llama.model.embed_tokens(torch.tensor(state.tokens)))
    caches = state.caches()
    by_hand = layer.self_attn.v_proj(x).view(len(x), 2, 16).transpose(0, 1)
    assert distance(caches.v[0], by_hand) < 1e-5
    z = caches.v_strips["action"][0]
    assert distance(z, x @ adapters["action"][0, "v_proj"].a.T) < 1e-5
    assert caches.k_strips["action"][0] is None
    exact = ReferenceState(llama, adapters, "nonshared")
    play(exact, TRAJECTORY)
    assert distance(state.seen_by("action").v[0], exact.seen_by("action").v[0]) < 1e-5
    assert distance(state.seen_by("action").v[0], caches.v[0]) > NOTICEABLE
    assert distance(state.seen_by("action").v[1], exact.seen_by("action").v[1]) > NOTICEABLE


# --- where policies must differ ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("llama", QV),
        ("llama", QKVO),
        ("llama", ALL_LINEAR),
        ("ministral", QKVO),
        ("gemma2", ALL_LINEAR),
    ],
)
def test_no_two_policies_give_a_reader_the_same_logits(
    kind: str, targets: tuple[str, ...], workshop: Workshop
) -> None:
    model, adapters = model_of(kind), workshop.pair(kind, targets=targets)
    last = {
        policy: play(ReferenceState(model, adapters, policy), TRAJECTORY)[-1]
        for policy in POLICIES
        if policy != "baselrshared"
    }
    for one, other in combinations(last, 2):
        assert distance(last[one], last[other]) > NOTICEABLE, (one, other)


@pytest.mark.parametrize("targets", [QV, QKVO], ids=["qv", "qkvo"])
def test_common_a_makes_prelrshared_baselrshared(
    targets: tuple[str, ...], workshop: Workshop, llama: transformers.PreTrainedModel
) -> None:
    adapters = workshop.pair_with_common_a("llama", targets=targets)
    states = {name: ReferenceState(llama, adapters, name) for name in POLICIES}
    last = {name: play(state, TRAJECTORY)[-1] for name, state in states.items()}
    assert distance(last["baselrshared"], last["prelrshared"]) == 0.0
    for other in ("nonshared", "fullshared", "baseshared", "rebaseshared"):
        assert distance(last["baselrshared"], last[other]) > NOTICEABLE
    strips = states["prelrshared"].caches().v_strips
    for one, other in zip(strips["plan"], strips["action"], strict=True):
        assert torch.equal(one, other)


def test_baselrshared_refuses_different_a_naming_the_layer(
    workshop: Workshop, llama: transformers.PreTrainedModel
) -> None:
    with pytest.raises(ValueError, match="v_proj differs between action and plan: layer 0"):
        ReferenceState(llama, workshop.pair("llama"), "baselrshared")


# --- who writes what, deeper than layer 0 ------------------------------------------------------


@pytest.mark.parametrize("target", ["v_proj", "k_proj"])
def test_prelrshared_writer_writes_every_strip_from_its_own_x(
    target: str, workshop: Workshop, llama: transformers.PreTrainedModel
) -> None:
    adapters = workshop.pair("llama", targets=QKVO)
    state = ReferenceState(llama, adapters, "prelrshared")
    state.turn("plan", TRAJECTORY[0][1])
    writer = own_pass(llama, adapters["plan"], state.tokens)
    reader = own_pass(llama, adapters["action"], state.tokens)
    caches = state.caches()
    strips = caches.v_strips if target == "v_proj" else caches.k_strips
    for layer in range(1, 4):
        a = adapters["action"][layer, target].a
        assert distance(strips["action"][layer], writer.inputs[layer] @ a.T) < TOLERANCE
        assert distance(strips["action"][layer], reader.inputs[layer] @ a.T) > NOTICEABLE


def test_baseshared_writes_one_strip_and_the_reader_catches_up_over_the_shared_base(
    workshop: Workshop, llama: transformers.PreTrainedModel
) -> None:
    adapters = workshop.pair("llama")
    state = ReferenceState(llama, adapters, "baseshared")
    first, second = TRAJECTORY[0][1], TRAJECTORY[1][1]
    state.turn("plan", first)
    before = state.caches()
    assert before.v_strips["plan"][1].shape[0] == len(first)
    assert before.v_strips["action"][1].shape[0] == 0
    state.turn("action", second)
    after = state.caches()
    assert after.v_strips["plan"][1].shape[0] == len(first)
    assert after.v_strips["action"][1].shape[0] == len(first) + len(second)
    for layer in range(4):
        assert torch.equal(after.v[layer][:, : len(first)], before.v[layer])
        assert torch.equal(after.k[layer][:, : len(first)], before.k[layer])
    # Layer 1's X is the reader's own over layer 0, where base and strip are exact; deeper, it reads
    # a base that another agent wrote.
    own = own_pass(llama, adapters["action"], first)
    strip = [z[: len(first)] for z in after.v_strips["action"]]
    own_strip = [x @ adapters["action"][layer, "v_proj"].a.T for layer, x in enumerate(own.inputs)]
    assert distance(strip[1], own_strip[1]) < TOLERANCE
    assert distance(strip[2], own_strip[2]) > NOTICEABLE


def test_rebaseshared_base_is_the_base_model_and_strips_are_neutral_but_the_writers_own(
    workshop: Workshop, llama: transformers.PreTrainedModel
) -> None:
    adapters = workshop.pair("llama")
    state = ReferenceState(llama, adapters, "rebaseshared")
    first = TRAJECTORY[0][1]
    own_logits = state.turn("plan", first)
    own = own_pass(llama, adapters["plan"], first)
    assert distance(own_logits, own.logits) < TOLERANCE  # no prefix yet: the turn is exact
    play(state, TRAJECTORY[1:])
    neutral = own_pass(llama, {}, state.tokens)
    caches, exact = state.caches(), ReferenceState(llama, adapters, "nonshared")
    exact.turn(None, state.tokens)
    for layer in range(4):
        assert distance(caches.k[layer], exact.seen_by(None).k[layer]) < TOLERANCE
        assert distance(caches.v[layer], exact.seen_by(None).v[layer]) < TOLERANCE
        plan_a, action_a = (adapters[name][layer, "v_proj"].a for name in ("plan", "action"))
        plan_strip = caches.v_strips["plan"][layer][: len(first)]
        action_strip = caches.v_strips["action"][layer][: len(first)]
        assert distance(plan_strip, own.inputs[layer] @ plan_a.T) < TOLERANCE
        assert distance(action_strip, neutral.inputs[layer][: len(first)] @ action_a.T) < TOLERANCE
        if layer > 0:
            wrong = neutral.inputs[layer][: len(first)] @ plan_a.T
            assert distance(plan_strip, wrong) > NOTICEABLE


def test_rebaseshared_loses_the_exactness_of_own_tokens(
    workshop: Workshop, llama: transformers.PreTrainedModel
) -> None:
    adapters = workshop.pair("llama")
    turns = [("plan", tokens) for _, tokens in TRAJECTORY]
    logits = play(ReferenceState(llama, adapters, "rebaseshared"), turns)
    expected = play(ReferenceState(llama, adapters, "nonshared"), turns)
    assert distance(logits[0], expected[0]) < TOLERANCE
    assert distance(logits[1], expected[1]) > NOTICEABLE


def test_base_agent_reads_only_the_base(
    workshop: Workshop, llama: transformers.PreTrainedModel
) -> None:
    adapters = workshop.pair("llama")
    neutral = ReferenceState(llama, adapters, "rebaseshared")
    adapted = ReferenceState(llama, adapters, "prelrshared")
    last = [play(state, [*TRAJECTORY[:2], TRAJECTORY[2]])[-1] for state in (neutral, adapted)]
    stock = stock_logits(llama, neutral.tokens)[-len(TRAJECTORY[2][1]) :]
    assert distance(last[0], stock) < TOLERANCE
    assert distance(last[1], stock) > NOTICEABLE
    for agent in adapters:  # and, as a writer, leaves a full strip for everyone
        for state in (neutral, adapted):
            assert state.caches().v_strips[agent][0].shape[0] == len(state.tokens)


# --- the life of a trajectory ------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_truncate_is_as_if_the_rest_had_never_been(
    policy: str, workshop: Workshop, llama: transformers.PreTrainedModel
) -> None:
    adapters = workshop.pair_with_common_a("llama", targets=QKVO)
    state, fresh = (ReferenceState(llama, adapters, policy) for _ in range(2))
    play(state, TRAJECTORY[:2])
    state.truncate(len(TRAJECTORY[0][1]))
    play(fresh, TRAJECTORY[:1])
    assert state.tokens == fresh.tokens
    assert state.writers == fresh.writers
    if policy == "baseshared":  # the reader has already caught up: the later catch-up is the same
        assert state.caches().v_strips["action"][0].shape[0] == len(state.tokens)
    for logits, expected in zip(
        play(state, TRAJECTORY[2:]), play(fresh, TRAJECTORY[2:]), strict=True
    ):
        assert distance(logits, expected) < TOLERANCE


@pytest.mark.parametrize("policy", ["fullshared", "baseshared", "prelrshared"])
def test_a_turn_in_two_parts_is_the_same_turn(
    policy: str, workshop: Workshop, llama: transformers.PreTrainedModel
) -> None:
    whole, parts = (ReferenceState(llama, workshop.pair("llama"), policy) for _ in range(2))
    agent, tokens = TRAJECTORY[1]
    for state in (whole, parts):
        state.turn(*TRAJECTORY[0])
    logits = torch.cat([parts.turn(agent, tokens[:4]), parts.turn(agent, tokens[4:])])
    assert distance(logits, whole.turn(agent, tokens)) < TOLERANCE


def test_rebaseshared_turn_reads_its_own_tokens_adapted_until_it_ends(
    workshop: Workshop, llama: transformers.PreTrainedModel
) -> None:
    whole, parts = (ReferenceState(llama, workshop.pair("llama"), "rebaseshared") for _ in range(2))
    agent, tokens = TRAJECTORY[0]
    logits = torch.cat([parts.turn(agent, tokens[:4]), parts.turn(agent, tokens[4:])])
    assert distance(logits, whole.turn(agent, tokens)) > NOTICEABLE


def test_late_adapter_under_prelrshared_catches_up_as_under_baseshared(
    workshop: Workshop, llama: transformers.PreTrainedModel
) -> None:
    adapters = workshop.pair("llama")
    late = ReferenceState(llama, {"plan": adapters["plan"]}, "prelrshared")
    from_start = ReferenceState(llama, adapters, "prelrshared")
    base_shared = ReferenceState(llama, adapters, "baseshared")
    for state in (late, from_start, base_shared):
        play(state, TRAJECTORY[:1])
    late.add_adapter("action", adapters["action"])
    with pytest.raises(ValueError, match="not filled"):
        late.seen_by("action")
    logits, wrong, expected = (
        state.turn(*TRAJECTORY[1]) for state in (late, from_start, base_shared)
    )
    assert distance(logits, expected) < TOLERANCE
    assert distance(logits, wrong) > NOTICEABLE
    assert late.caches().v_strips["action"][2].shape[0] == len(late.tokens)


def test_strip_with_missing_tokens_is_left_to_its_owner(
    workshop: Workshop, llama: transformers.PreTrainedModel
) -> None:
    adapters = workshop.pair("llama")
    state = ReferenceState(llama, {"plan": adapters["plan"]}, "prelrshared")
    state.turn(*TRAJECTORY[0])
    state.add_adapter("action", adapters["action"])
    state.turn("plan", TRAJECTORY[3][1])
    assert state.caches().v_strips["action"][0].shape[0] == 0
    state.turn("action", TRAJECTORY[1][1])
    state.turn("plan", TRAJECTORY[3][1])  # complete again: others write it from here on
    assert state.caches().v_strips["action"][0].shape[0] == len(state.tokens)


def test_late_adapter_with_the_common_a_misses_nothing(
    workshop: Workshop, llama: transformers.PreTrainedModel
) -> None:
    adapters = workshop.pair_with_common_a("llama")
    late = ReferenceState(llama, {"plan": adapters["plan"]}, "baselrshared")
    from_start = ReferenceState(llama, adapters, "baselrshared")
    play(late, TRAJECTORY[:1])
    play(from_start, TRAJECTORY[:1])
    late.add_adapter("action", adapters["action"])
    assert distance(late.turn(*TRAJECTORY[1]), from_start.turn(*TRAJECTORY[1])) == 0.0


def test_late_adapter_under_rebaseshared_is_as_if_it_had_been_there(
    workshop: Workshop, llama: transformers.PreTrainedModel
) -> None:
    adapters = workshop.pair("llama", targets=QKVO)
    late = ReferenceState(llama, {"plan": adapters["plan"]}, "rebaseshared")
    from_start = ReferenceState(llama, adapters, "rebaseshared")
    turns = [TRAJECTORY[0], TRAJECTORY[2], TRAJECTORY[3]]
    play(late, turns)
    play(from_start, turns)
    late.add_adapter("action", adapters["action"])
    assert distance(late.turn(*TRAJECTORY[4]), from_start.turn(*TRAJECTORY[4])) < TOLERANCE


@pytest.mark.parametrize(
    ("policy", "tokens_kept"),
    [
        ("nonshared", 26),
        ("fullshared", 11),
        ("baseshared", 11),
        ("prelrshared", 11),
        ("rebaseshared", 26),
    ],
)
def test_replaced_adapter_takes_what_it_wrote_along_unless_the_base_is_neutral(
    policy: str, tokens_kept: int, workshop: Workshop, llama: transformers.PreTrainedModel
) -> None:
    adapters = workshop.pair("llama")
    state = ReferenceState(llama, adapters, policy)
    play(state, TRAJECTORY[:4])
    state.add_adapter("action", dict(adapters["action"]))  # the same weights: nothing happens
    assert len(state.tokens) == 26
    state.add_adapter("action", workshop.adapter("llama", "new", seed=30))
    assert len(state.tokens) == tokens_kept
    if policy in ("baseshared", "prelrshared", "rebaseshared"):
        assert state.caches().v_strips["action"][0].shape[0] == 0
    state.turn(*TRAJECTORY[4])
