"""Features that are not implemented are refused in one error that names every field and tensor of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora.config import BdLoraConfig, KasaConfig, MontecloraConfig, VeloraConfig
from transformers import GPT2Config, GPT2LMHeadModel

from precache.adapters import load_adapter
from precache.errors import UnsupportedAdapterError
from tests.adapters.folders import (
    SHAPE,
    TensorEdit,
    edit_config,
    edit_tensors,
    tensor_name,
    tiny_model,
    write_adapter,
)


def refusal(folder: Path) -> UnsupportedAdapterError:
    with pytest.raises(UnsupportedAdapterError) as caught:
        load_adapter(folder, SHAPE, dtype=torch.float32, device="cpu")
    return caught.value


# PEFT config -> what the error has to name: the field, and the tensors where the feature has some.
FEATURES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "dora": ({"use_dora": True}, ["use_dora=True", "q_proj.lora_magnitude_vector (3 tensors)"]),
    "modules_to_save": (
        {"modules_to_save": ["lm_head"]},
        ["modules_to_save=['lm_head']", "base_model.model.lm_head.weight"],
    ),
    "lora_bias": ({"lora_bias": True}, ["lora_bias=True", "v_proj.lora_B.bias (3 tensors)"]),
    "bias": ({"bias": "all"}, ["bias='all'"]),
    "alora": ({"alora_invocation_tokens": [1, 2]}, ["alora_invocation_tokens=[1, 2]"]),
    "trainable tokens": (
        {"trainable_token_indices": [0, 5]},
        ["trainable_token_indices=[0, 5]", "embed_tokens.token_adapter"],
    ),
    "lora on lm_head": (
        {"target_modules": ["q_proj", "lm_head"]},
        ["target_modules selects lm_head", "lm_head.lora_A.weight", "lm_head.lora_B.weight"],
    ),
    "lora on the embeddings": (
        {"target_modules": ["q_proj", "embed_tokens"]},
        ["target_modules selects model.embed_tokens", "embed_tokens.lora_embedding_A"],
    ),
    "replicated layers": ({"layer_replication": [[0, 2], [1, 3]]}, ["layer_replication="]),
    "parameters": (
        {"target_parameters": ["mlp.up_proj.weight"]},
        ["target_parameters=", "mlp.up_proj"],
    ),
    "velora": ({"velora_config": VeloraConfig(num_groups=8)}, ["velora_config="]),
    "monte carlo": ({"monteclora_config": MontecloraConfig()}, ["monteclora_config="]),
    "kasa": ({"kasa_config": KasaConfig()}, ["kasa_config="]),
    "block-diagonal": (
        {"use_bdlora": BdLoraConfig(target_modules_bd_b=["q_proj", "v_proj"], nblocks=2)},
        ["use_bdlora="],
    ),
    "pissa": ({"init_lora_weights": "pissa"}, ["init_lora_weights='pissa'", "base weights"]),
    "olora": ({"init_lora_weights": "olora"}, ["init_lora_weights='olora'"]),
}


@pytest.mark.parametrize(("config", "named"), FEATURES.values(), ids=FEATURES)
def test_features_of_peft_are_refused_by_name(
    tmp_path: Path, config: dict[str, Any], named: list[str]
) -> None:
    message = str(refusal(write_adapter(tmp_path / "a", **config)))
    assert str(tmp_path / "a") in message
    for text in named:
        assert text in message


# What PEFT cannot write here, or what a newer PEFT might: the file is edited by hand.
FIELDS: dict[str, Any] = {
    "use_qalora": True,
    "arrow_config": {"top_k": 2},
    "megatron_config": {"x": 1},
    "fan_in_fan_out": True,
    "init_lora_weights": "pissa_niter_4",
    "peft_type": "IA3",
    "r": 0,
    "lora_alpha": float("nan"),
    "use_rslora": "yes",
    "rank_pattern": {"q_proj": "big"},
    "alpha_pattern": [1],
    "target_modules": {"q_proj": 1},
    "exclude_modules": "(",
    "layers_to_transform": "1",
    "base_model_name_or_path": 5,
    "a_field_of_tomorrow": {"on": True},
}


@pytest.mark.parametrize("field", FIELDS)
def test_unusable_fields_are_refused_by_name(tmp_path: Path, field: str) -> None:
    folder = edit_config(write_adapter(tmp_path / "a"), **{field: FIELDS[field]})
    assert f"{field}" in str(refusal(folder))


def test_patterns_that_break_inside_pefts_own_expression_are_refused(tmp_path: Path) -> None:
    folder = edit_config(write_adapter(tmp_path / "a"), rank_pattern={"(?i)q_proj": 2})
    assert "rank_pattern" in str(refusal(folder))
    edit_config(folder, rank_pattern={}, layers_pattern="(", layers_to_transform=[1])
    assert "layers_pattern" in str(refusal(folder))


@pytest.mark.parametrize("empty", [None, False, [], {}, "", 0], ids=repr)
def test_empty_values_of_unknown_fields_load(tmp_path: Path, empty: object) -> None:
    folder = edit_config(write_adapter(tmp_path / "a"), a_field_of_tomorrow=empty)
    assert load_adapter(folder, SHAPE, dtype=torch.float32, device="cpu").modules


@pytest.mark.parametrize(
    "field", ["loftq_config", "eva_config", "corda_config", "lora_ga_config", "auto_mapping"]
)
def test_leftovers_of_an_initialisation_load(tmp_path: Path, field: str) -> None:
    folder = edit_config(write_adapter(tmp_path / "a"), **{field: {"rho": 2.0}})
    assert load_adapter(folder, SHAPE, dtype=torch.float32, device="cpu").modules


def test_everything_is_named_at_once(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", use_dora=True, bias="all", modules_to_save=["lm_head"])
    edit_config(folder, a_field_of_tomorrow=1, peft_type="LOHA")
    error = refusal(folder)
    message = str(error)
    expected = ["use_dora", "bias=", "modules_to_save", "a_field_of_tomorrow", "peft_type"]
    expected += ["lora_magnitude_vector", "lm_head.weight"]
    for text in expected:
        assert text in message
    assert len(error.problems) >= len(expected)


def _move(old: str, new: str) -> TensorEdit:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace(old, new)] = tensors.pop(name)

    return edit


TENSORS: dict[str, tuple[TensorEdit, str]] = {
    "A without B": (
        lambda tensors: tensors.pop(tensor_name(1, "q_proj", "B")),
        f"tensor {tensor_name(1, 'q_proj', 'A')} has no partner",
    ),
    "B without A": (
        lambda tensors: tensors.pop(tensor_name(2, "v_proj", "A")),
        f"tensor {tensor_name(2, 'v_proj', 'B')} has no partner",
    ),
    "no tensors": (lambda tensors: tensors.clear(), "no LoRA tensor"),
    "multimodal prefix": (
        _move("model.model.layers", "model.model.language_model.layers"),
        "language_model.layers.*.self_attn.q_proj.lora_A.weight (3 tensors)",
    ),
    "fused projection": (_move("q_proj", "qkv_proj"), "self_attn.qkv_proj.lora_A.weight"),
    "attention module under mlp": (_move("self_attn.q_proj", "mlp.q_proj"), "mlp.q_proj"),
    "experts": (_move("self_attn.q_proj", "mlp.experts.0.up_proj"), "mlp.experts.*.up_proj"),
    "two spellings": (
        lambda tensors: tensors.update(
            {
                tensor_name(0, "q_proj", side).replace(".weight", ".default.weight"): torch.ones(2)
                for side in "AB"
            }
        ),
        "two tensors for q_proj of layer 0",
    ),
    "integers": (
        lambda tensors: tensors.update(
            {tensor_name(0, "q_proj", "A"): torch.ones(4, 64, dtype=torch.int8)}
        ),
        f"{tensor_name(0, 'q_proj', 'A')} (I8)",
    ),
    "a layer left out": (
        lambda tensors: [tensors.pop(tensor_name(1, "v_proj", side)) for side in "AB"],
        "the config selects v_proj in layer 1, the file holds no tensors for it",
    ),
    "a target left out": (
        lambda tensors: [tensors.pop(name) for name in list(tensors) if "v_proj" in name],
        "the config selects v_proj in layers 0-2, the file holds no tensors for it",
    ),
    "a target too many": (
        lambda tensors: tensors.update(
            {
                tensor_name(1, "o_proj", "A"): torch.ones(4, 64),
                tensor_name(1, "o_proj", "B"): torch.ones(64, 4),
            }
        ),
        "the file holds tensors for o_proj in layer 1, the config does not select it",
    ),
    "another rank than stated": (
        lambda tensors: tensors.update(
            {
                tensor_name(0, "q_proj", "A"): torch.ones(5, 64),
                tensor_name(0, "q_proj", "B"): torch.ones(64, 5),
            }
        ),
        "rank of q_proj in layer 0: got 5 in the file, 4 in the config",
    ),
    "rank 0": (
        lambda tensors: tensors.update(
            {
                tensor_name(0, "q_proj", "A"): torch.ones(0, 64),
                tensor_name(0, "q_proj", "B"): torch.ones(64, 0),
            }
        ),
        "rank of q_proj in layer 0: got 0",
    ),
}


@pytest.mark.parametrize(("edit", "named"), TENSORS.values(), ids=TENSORS)
def test_tensors_that_do_not_map_are_named(tmp_path: Path, edit: TensorEdit, named: str) -> None:
    assert named in str(refusal(edit_tensors(write_adapter(tmp_path / "a"), edit)))


def test_conv1d_adapter_of_gpt2_is_refused(tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=100))
    folder = write_adapter(
        tmp_path / "a", model=model, target_modules=["c_attn"], fan_in_fan_out=True
    )
    message = str(refusal(folder))
    assert "fan_in_fan_out=True" in message
    assert "transformer.h.*.attn.c_attn.lora_A.weight (2 tensors)" in message


def test_rank_above_the_limit_names_both_numbers(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", r=4, rank_pattern={"q_proj": 300})
    with pytest.raises(
        UnsupportedAdapterError, match="q_proj in layers 0-2: got 300, allowed are 1 to 256"
    ):
        load_adapter(folder, SHAPE, dtype=torch.float32, device="cpu", max_lora_rank=256)
    assert load_adapter(folder, SHAPE, dtype=torch.float32, device="cpu").modules


def test_resized_vocabulary_names_both_sizes(tmp_path: Path) -> None:
    model = tiny_model()
    model.resize_token_embeddings(105)
    folder = write_adapter(tmp_path / "a", model=model, modules_to_save=["embed_tokens", "lm_head"])
    message = str(refusal(folder))
    for table in ("model.embed_tokens.weight", "lm_head.weight"):
        assert f"{table} has 105 rows, the vocabulary of this model has 100" in message


def test_lora_on_a_tied_head_is_refused(tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=True)
    folder = write_adapter(tmp_path / "a", model=model, target_modules=["v_proj", "lm_head"])
    assert "target_modules selects lm_head" in str(refusal(folder))
