"""What Engine.load takes and refuses: models, adapters, policies and settings, each before anything is served."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from precache import Engine
from precache.adapters import AdapterNameError
from precache.config import parse_size
from precache.engine import hooks
from precache.errors import (
    AdapterFormatError,
    AdapterShapeError,
    ConfigError,
    ModelError,
    NonFiniteAdapterError,
    PolicyNotAllowedError,
    UnknownPolicyError,
    UnsupportedAdapterError,
    UnsupportedModelError,
)
from tests.engine.conftest import SetupOf
from tests.engine.setup import Setup
from tests.engine.trajectories import (
    TOLERANCE,
    difference,
    only_trajectory,
    play_engine,
    stored,
    stored_difference,
    tokens,
)
from tests.reference.lora import make_adapter
from tests.reference.models import save_tiny


def test_load_takes_a_folder_and_adapters_and_equals_the_reference(llama: Setup) -> None:
    with Engine.load(
        llama.model, llama.adapters(), policy="prelrshared", cache_memory="8MiB", dtype="float32"
    ) as engine:
        played = play_engine(engine)
        assert engine.agents() == ("base", "plan", "action", "reflect")
        assert engine.stats().budget == 8 * 2**20
        assert engine.generate("plan", "Question: αβγ", max_tokens=3).text is not None
    assert difference(played.logits, llama.expected("prelrshared")) < TOLERANCE
    assert sum(played.cached) > 0


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        (
            {"policy": "sharedshared"},
            UnknownPolicyError,
            "unknown policy: got 'sharedshared', .*prelr",
        ),
        ({"policy": ""}, UnknownPolicyError, "unknown policy: got ''"),
        (
            {"policy": "rebaseshared", "schedule": "never"},
            UnknownPolicyError,
            r"unknown schedule: got 'never', allowed are \['lazy-prefill', 'double-batch'",
        ),
        (
            {"policy": "prelrshared", "schedule": "lazy-prefill"},
            UnknownPolicyError,
            "prelrshared has no schedule",
        ),
        ({"dtype": "int8"}, ConfigError, "dtype: got 'int8', .*bfloat16"),
        ({"dtype": "half"}, ConfigError, "dtype: got 'half'"),
        ({"cache_memory": 0}, ConfigError, "cache_memory: got 0"),
        ({"cache_memory": -1}, ConfigError, "cache_memory: got -1"),
        ({"cache_memory": "2 potatoes"}, ConfigError, "cache_memory: got '2 potatoes'.*2GiB"),
        ({"cache_memory": "0.1"}, ConfigError, "cache_memory"),
        ({"cache_memory": True}, ConfigError, "cache_memory: got True"),
        (
            {"prefill_chunk": 0},
            ConfigError,
            "prefill_chunk: got 0, allowed is an integer of at least 1",
        ),
        ({"prefill_chunk": 2.5}, ConfigError, "prefill_chunk: got 2.5"),
        ({"growth_tokens": True}, ConfigError, "growth_tokens: got True"),
        ({"context_window": 0}, ConfigError, "context_window: got 0"),
        ({"context_window": 513}, ConfigError, "context_window: got 513, allowed is at most 512"),
        ({"device": "toaster"}, ConfigError, "device: got 'toaster'"),
        ({"attention_backend": "magic"}, ConfigError, "attention_backend: got 'magic'.*cpu"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(
    llama: Setup, settings: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        Engine.load(llama.model, **settings)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 * 2**30),
        ("512 MB", 512 * 10**6),
        ("1k", 1000),
        ("1.5KiB", 1536),
        (7, 7),
        ("7", 7),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


# -- models ------------------------------------------------------------------------------------------------------


def config_of(kind: str) -> transformers.PreTrainedConfig:
    small = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    if kind == "gpt2":
        return transformers.GPT2Config(n_embd=32, n_head=2, n_layer=1, vocab_size=64)
    if kind == "phi3":
        return transformers.Phi3Config(**small, intermediate_size=32, pad_token_id=0)
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    return transformers.LlamaConfig(**small, rope_parameters=rope)


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("gpt2", "model type 'gpt2' is not supported: allowed are llama, .*gemma3_text"),
        ("phi3", "model type 'phi3' is not supported"),
        ("dynamic", "rope type 'dynamic' is not supported: .*allowed are default, linear"),
    ],
)
def test_an_unsupported_model_is_refused_before_its_weights_are_read(
    tmp_path: Path, kind: str, match: str
) -> None:
    config_of(kind).save_pretrained(tmp_path)  # there are no weights
    with pytest.raises(UnsupportedModelError, match=match):
        Engine.load(str(tmp_path))


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def pickled(folder: Path) -> None:
    path = folder / "model.safetensors"
    torch.save(load_file(path), folder / "pytorch_model.bin")
    path.unlink()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: shutil.rmtree(folder),
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "config.json").write_text("{"),
        lambda folder: (folder / "config.json").write_text('{"model_type": "nonesuch"}'),
        cut,
        pickled,
    ],
    ids=["no folder", "no weights", "broken config", "unknown type", "cut weights", "a pickle"],
)
def test_a_model_that_cannot_be_read_is_refused(
    llama: Setup, tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(llama.model, folder)
    spoil(folder)
    with pytest.raises(ModelError, match="cannot be loaded"):
        Engine.load(str(folder), dtype="float32")


def test_an_attention_without_its_mask_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class ForgetfulInterface:
        register = staticmethod(lambda name, function: None)

        def valid_keys(self) -> list[str]:
            return []

    monkeypatch.setattr(hooks, "AttentionMaskInterface", ForgetfulInterface)
    with pytest.raises(ModelError, match="mask function"):
        hooks.register_attention()


# -- adapters ----------------------------------------------------------------------------------------------------


def with_nan(llama: Setup, folder: Path) -> Path:
    shutil.copytree(llama.adapters()["plan"], folder / "nan")
    path = folder / "nan" / "adapter_model.safetensors"
    tensors = load_file(path)
    next(iter(tensors.values()))[0, 0] = torch.nan
    save_file(tensors, path, {"format": "pt"})
    return folder / "nan"


def truncated(llama: Setup, folder: Path) -> Path:
    shutil.copytree(llama.adapters()["plan"], folder / "cut")
    path = folder / "cut" / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return folder / "cut"


def for_another_base(llama: Setup, folder: Path) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=32, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "base")
    return make_adapter(folder / "base", folder / "other")


def with_dora(llama: Setup, folder: Path) -> Path:
    return make_adapter(llama.model, folder / "dora", use_dora=True)


def nothing(llama: Setup, folder: Path) -> Path:
    return folder / "nothing"


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (with_nan, NonFiniteAdapterError, "NaN or Inf in .*lora_"),
        (truncated, AdapterFormatError, "cut"),
        (for_another_base, AdapterShapeError, r"another base model: .* this model needs \[4, 64\]"),
        (with_dora, UnsupportedAdapterError, "use_dora"),
        (nothing, AdapterFormatError, "no such path"),
    ],
)
def test_a_bad_adapter_is_refused_and_the_running_ones_go_on(
    llama: Setup, tmp_path: Path, make: Any, error: type[Exception], match: str
) -> None:
    engine = llama.engine()
    stream = engine.stream("plan", tokens(20), max_tokens=4, ignore_eos=True)
    said = list(next(stream).token_ids)
    before = stored(engine, only_trajectory(engine))
    bad = make(llama, tmp_path)
    with pytest.raises(error, match=match):
        engine.add_adapter("critic", bad)
    with pytest.raises(error, match=match):
        engine.replace_adapter("plan", bad)
    assert engine.agents() == ("base", "plan", "action", "reflect")
    assert stored_difference(stored(engine, only_trajectory(engine)), before) == 0
    said += [token for chunk in stream for token in chunk.token_ids]
    alone = llama.engine().generate("plan", tokens(20), max_tokens=4, ignore_eos=True)
    assert tuple(said) == alone.token_ids


@pytest.mark.parametrize("name", ["base", "", "a b", "x" * 129, "é"])
def test_a_name_that_no_adapter_may_have(llama: Setup, name: str) -> None:
    with pytest.raises(AdapterNameError, match="adapter name: got"):
        llama.engine(adapters={name: llama.adapters()["plan"]})


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_key_lora_is_refused_where_keys_are_normalised(setup_of: SetupOf, kind: str) -> None:
    setup = setup_of(kind)
    engine = setup.engine()
    with pytest.raises(
        PolicyNotAllowedError, match="key LoRA .k_proj. in critic: .* normalises its keys"
    ):
        engine.add_adapter("critic", setup.adapters("qkvo")["plan"])
    assert engine.agents() == ("base", "plan", "action", "reflect")


def test_baselrshared_names_the_first_layer_whose_a_differs(llama: Setup) -> None:
    with pytest.raises(
        PolicyNotAllowedError, match="v_proj of layer 0 differs between 'plan' and 'action'"
    ):
        llama.engine("baselrshared")
    late = (
        llama.adapters("shared_a")["plan"],
        llama.other_adapter(
            4, share_a_with=llama.adapters("shared_a")["plan"], layers_to_transform=[0, 1]
        ),
    )
    with pytest.raises(PolicyNotAllowedError, match="layer 2 differs"):
        llama.engine("baselrshared", adapters=dict(zip("ab", late, strict=True)))


def test_a_load_that_fails_leaves_no_thread(llama: Setup, tmp_path: Path) -> None:
    before = threading.active_count()
    with pytest.raises(AdapterFormatError):
        Engine.load(
            llama.model,
            {"plan": tmp_path / "nothing"},
            policy="rebaseshared",
            schedule="idle-lazy-prefill",
            dtype="float32",
        )
    assert threading.active_count() == before


def test_engines_over_one_model_do_not_meet(llama: Setup) -> None:
    one = llama.engine("prelrshared")
    other = one.with_policy("rebaseshared", "double-batch")
    one.score("plan", tokens(20), tokens(2))
    assert other.sessions() == ()
    assert difference(play_engine(other).logits, llama.expected("rebaseshared")) < TOLERANCE
    assert other.config == replace(one.config, policy="rebaseshared", schedule="double-batch")
    assert other.config != one.config


def test_another_policy_takes_the_adapters_as_they_are_loaded(llama: Setup, tmp_path: Path) -> None:
    folder = shutil.copytree(llama.adapters()["plan"], tmp_path / "plan")
    one = llama.engine(adapters={"plan": folder, "action": llama.adapters()["action"]})
    shutil.rmtree(folder)
    other = one.with_policy("nonshared")
    assert other.agents() == one.agents()
    assert [a.digest for a in other.bank] == [a.digest for a in one.bank]
    other.remove_adapter("plan")
    assert one.agents() == ("base", "plan", "action")
    with pytest.raises(PolicyNotAllowedError, match="differs between 'plan' and 'action'"):
        one.with_policy("baselrshared")


def test_a_model_without_a_tokenizer_loads(tmp_path: Path) -> None:
    folder = save_tiny("qwen2", tmp_path / "model", num_layers=1)
    for path in folder.glob("*token*"):
        path.unlink()
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    engine = Engine.load(str(folder), dtype="float32")
    assert engine.tokenizer is None
    assert engine.generate("base", [5, 6], max_tokens=2).text == ""
