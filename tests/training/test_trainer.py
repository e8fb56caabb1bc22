"""Steps, schedule, order of the data, and resuming, on a tiny random Llama."""

from __future__ import annotations

import torch

from precache.tasks import ROLES
from precache.training import Recipe
from precache.training.encoding import encode_all
from precache.training.evaluation import evaluate
from precache.training.loss import score_tokens
from precache.training.trainer import (
    RoleTrainer,
    StepResult,
    add_adapter,
    batch_indices,
    learning_rate,
    role_seed,
)
from tests.training.helpers import tiny_model, tiny_tokenizer, trajectories

EXAMPLES = encode_all(trajectories(), ROLES, tiny_tokenizer(), max_tokens=256)
RECIPE = Recipe(steps=8, batch=3, lr=1e-2, warmup_steps=2)


def _trainer(role: str = "plan", recipe: Recipe = RECIPE) -> RoleTrainer:
    model = add_adapter(tiny_model(), recipe, role_seed(recipe.seed, role))
    return RoleTrainer(model, role, [e.only(role) for e in EXAMPLES], recipe)


def _ignore(_: StepResult) -> None:
    pass


def test_scores_equal_the_plain_full_forward() -> None:
    model, example = tiny_model(), EXAMPLES[0]
    positions = torch.tensor(example.targets["plan"])
    with torch.inference_mode():
        logits = model(torch.tensor([example.input_ids])).logits[0]
        scores = score_tokens(model, example.input_ids, example.targets["plan"])

    labels = torch.tensor(example.input_ids)[positions]
    expected = -logits.log_softmax(-1)[positions - 1, labels]
    torch.testing.assert_close(scores.nll, expected, atol=1e-5, rtol=0)
    assert scores.is_top1.tolist() == (logits.argmax(-1)[positions - 1] == labels).tolist()


def test_evaluation_is_the_mean_over_tokens_of_each_role() -> None:
    model, examples = tiny_model(), EXAMPLES[:3]

    scores = evaluate(model, examples, ROLES)

    for role in ROLES:
        with torch.inference_mode():
            alone = [score_tokens(model, e.input_ids, e.targets[role]).nll for e in examples]
        assert abs(scores[role].nll - float(torch.cat(alone).mean())) < 1e-5
        assert scores[role].tokens == sum(len(e.targets[role]) for e in examples)


def test_training_lowers_the_loss_of_its_role() -> None:
    recipe = Recipe(steps=25, batch=4, lr=3e-2, targets="all-linear")
    model = add_adapter(tiny_model(), recipe, seed=1)
    base = model.get_base_model()
    before = evaluate(base, EXAMPLES, ["plan"])["plan"].nll
    trainer = RoleTrainer(model, "plan", [e.only("plan") for e in EXAMPLES], recipe)

    trainer.run(_ignore)

    assert evaluate(base, EXAMPLES, ["plan"])["plan"].nll < before - 0.5
    assert len(trainer.losses) == recipe.steps


def test_only_adapter_weights_change() -> None:
    untouched = tiny_model().state_dict()
    model = add_adapter(tiny_model(), RECIPE, seed=1)
    trainer = RoleTrainer(model, "plan", [e.only("plan") for e in EXAMPLES], RECIPE)

    trainer.run(_ignore)

    base = model.get_base_model()
    after = {n.replace(".base_layer", ""): p for n, p in base.state_dict().items()}
    assert all(torch.equal(weight, after[name]) for name, weight in untouched.items())
    lora_b = [p for name, p in after.items() if "lora_B" in name]
    assert lora_b
    assert all(bool(p.abs().max() > 0) for p in lora_b)


def test_resumed_run_equals_an_uninterrupted_one_bit_for_bit() -> None:
    whole = _trainer()
    whole.run(_ignore)
    first = _trainer()
    for _ in range(3):
        first.step()
    second = _trainer()
    second.load_state(first.losses, first.state_tensors())

    second.run(_ignore)

    assert second.losses == whole.losses
    expected, got = whole.state_tensors(), second.state_tensors()
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    assert not all(torch.equal(expected[n], t) for n, t in first.state_tensors().items())


def test_forgetting_the_optimiser_would_change_the_result() -> None:
    whole = _trainer()
    whole.run(_ignore)
    first = _trainer()
    for _ in range(3):
        first.step()
    broken = first.state_tensors()
    for name in broken:
        if name.startswith("exp_avg"):
            broken[name] = torch.zeros_like(broken[name])
    second = _trainer()
    second.load_state(first.losses, broken)
    second.run(_ignore)

    assert second.losses != whole.losses


def test_roles_start_from_different_weights_and_see_different_orders() -> None:
    plan, action = _trainer("plan").state_tensors(), _trainer("action").state_tensors()

    lora_a = [name for name in plan if "lora_A" in name]
    assert lora_a
    assert not any(torch.equal(plan[name], action[name]) for name in lora_a)
    assert batch_indices(100, 4, 0, role_seed(0, "plan")) != batch_indices(
        100, 4, 0, role_seed(0, "action")
    )


def test_every_epoch_sees_each_example_once_in_a_new_order() -> None:
    seen = [i for step in range(10) for i in batch_indices(20, 4, step, seed=5)]

    assert sorted(seen[:20]) == sorted(seen[20:]) == list(range(20))
    assert seen[:20] != seen[20:]


def test_batch_larger_than_the_data_wraps_into_the_next_epoch() -> None:
    assert sorted(batch_indices(2, 6, 0, seed=1)) == [0, 0, 0, 1, 1, 1]


def test_learning_rate_warms_up_and_decays() -> None:
    recipe = Recipe(steps=20, warmup_steps=4, lr=1.0)
    rates = [learning_rate(recipe, step) for step in range(20)]

    assert rates[:4] == sorted(rates[:4])
    assert max(rates) == rates[4] == 1.0
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert 0.1 <= rates[-1] < 0.2


def test_batch_loss_weighs_every_token_alike() -> None:
    trainer = _trainer(recipe=Recipe(steps=1, batch=len(EXAMPLES)))
    expected = evaluate(tiny_model(), EXAMPLES, ["plan"])["plan"].nll  # B is 0 at the start

    assert abs(trainer.step().loss - expected) < 1e-4
