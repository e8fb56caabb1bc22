"""The supervised tokens are exactly the text that a role wrote."""

from __future__ import annotations

import pytest

from precache.tasks import ROLES, Segment, Trajectory
from precache.training import TrainingDataError
from precache.training.encoding import Encoded, encode, encode_all
from tests.training.helpers import tiny_tokenizer, trajectories, trajectory

TOKENIZER = tiny_tokenizer()


def _written(example: Encoded, role: str) -> str:
    return TOKENIZER.decode([example.input_ids[p] for p in example.targets[role]])


@pytest.mark.parametrize("role", ROLES)
def test_targets_spell_exactly_what_the_role_wrote(role: str) -> None:
    for run in trajectories():
        example = encode(run, ROLES, TOKENIZER, max_tokens=1024)

        assert _written(example, role) == "".join(turn.target for turn in run.turns(role))


def test_first_target_carries_the_space_after_the_cue() -> None:
    example = encode(trajectory(0), ["plan"], TOKENIZER, max_tokens=1024)
    first = example.targets["plan"][0]

    assert TOKENIZER.decode([example.input_ids[first]]).startswith(" ")
    assert TOKENIZER.decode(list(example.input_ids[:first])).endswith("Thought 1:")


def test_all_roles_share_the_ids_of_one_text() -> None:
    run = trajectory(3)
    whole = encode(run, ROLES, TOKENIZER, max_tokens=1024)

    for role in ROLES:
        own = whole.only(role)
        assert own.input_ids == whole.input_ids[: len(own.input_ids)]
        assert own.targets == {role: whole.targets[role]}
        assert own.targets[role][-1] == len(own.input_ids) - 1


def test_token_that_straddles_a_border_belongs_to_nobody() -> None:
    # ".\n" may be merged by this tokenizer; a border inside it must not be supervised.
    tokenizer = tiny_tokenizer()
    text = trajectory(0).text
    encoding = tokenizer.encode(text)
    start, end = next(
        offset for offset in encoding.offsets if offset[1] - offset[0] >= 3 and offset[0] > 0
    )
    middle = start + 1
    run = Trajectory("q", (Segment(None, text[:middle]), Segment("plan", text[middle:])))

    example = encode(run, ["plan"], tokenizer, max_tokens=1024)

    first = example.targets["plan"][0]
    assert encoding.offsets[first][0] == end


def test_turn_that_does_not_fit_is_dropped_whole() -> None:
    run = trajectory(0)
    whole = encode(run, ROLES, TOKENIZER, max_tokens=1024)
    limit = whole.targets["action"][-1]  # one token short of the end of the action's turn

    cut = encode(run, ROLES, TOKENIZER, max_tokens=limit)

    assert sorted(cut.targets) == ["plan"]
    assert cut.targets["plan"] == whole.targets["plan"]
    assert len(cut.input_ids) == whole.targets["plan"][-1] + 1


def test_turn_that_just_fits_is_kept() -> None:
    run = trajectory(0)
    whole = encode(run, ROLES, TOKENIZER, max_tokens=1024)

    cut = encode(run, ROLES, TOKENIZER, max_tokens=whole.targets["action"][-1] + 1)

    assert cut.targets["action"] == whole.targets["action"]


def test_role_that_writes_nothing_is_refused_by_name() -> None:
    with pytest.raises(TrainingDataError, match="'critic'.*action, plan, reflect"):
        encode_all(trajectories(), ["plan", "critic"], TOKENIZER, max_tokens=1024)
