"""Tiny random models of every supported architecture, as objects and as folders a user could load.

Owns: which sizes, windows, soft-caps and random weights the tests run on. The weights are large on
purpose: attention is far from uniform, biases and norm weights are not trivial, so that a forgotten
bias or a wrong mask is seen in the logits.
Does not own: adapters (`lora.py`) and what a forward pass means (`forward.py`).
"""

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

VOCAB_SIZE = 128
SLIDING_WINDOW = 7  # short, so that a test of a few dozen tokens crosses it many times
NUM_LAYERS = 4
INITIALIZER_RANGE = 0.2
NORM_NOISE = 0.3
QK_NORM_GAIN = 1.6  # q and k of unit size would leave attention nearly uniform
BIAS_STD = 0.5

SPECIAL_TOKENS = (
    "<unk>",
    "<s>",
    "</s>",
    "<pad>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
)
BOS_TOKEN_ID, EOS_TOKEN_ID, PAD_TOKEN_ID = 1, 2, 3

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_SHARED = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": INITIALIZER_RANGE,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": PAD_TOKEN_ID,
}

# kind -> (transformers config class, what differs from _SHARED)
_KINDS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "llama3": (
        "LlamaConfig",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral_swa": ("MistralConfig", {"sliding_window": SLIDING_WINDOW}),
    "ministral": (
        "MinistralConfig",
        {
            "sliding_window": SLIDING_WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2),
        },
    ),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {}),
    "gemma2": (
        "Gemma2Config",
        {
            "sliding_window": SLIDING_WINDOW,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 6.0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "sliding_window": SLIDING_WINDOW,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention"] * (NUM_LAYERS - 2)
            + ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "linear",
                    "rope_theta": 1_000_000.0,
                    "factor": 2.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
}

MODEL_KINDS = tuple(_KINDS)


def tiny_config(kind: str, num_layers: int = NUM_LAYERS, **sizes: int) -> PreTrainedConfig:
    """Return the configuration of one tiny architecture; `sizes` (`head_dim=32`, ...) go on top."""
    class_name, overrides = _KINDS[kind]
    values = {**_SHARED, **overrides, **sizes, "num_hidden_layers": num_layers}
    if "layer_types" in values:
        values["layer_types"] = values["layer_types"][:num_layers]
    return getattr(transformers, class_name)(**values)


def tiny_model(
    kind: str, *, num_layers: int = NUM_LAYERS, seed: int = 0, **sizes: int
) -> PreTrainedModel:
    """Build one tiny random model, fp32, in eval mode, with plain (eager) attention.

    Eager, because stock SDPA silently ignores gemma2's attention soft-cap.
    """
    generator = torch.Generator().manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        tiny_config(kind, num_layers, **sizes), dtype=torch.float32, attn_implementation="eager"
    )
    for name, parameter in sorted(model.named_parameters()):
        with torch.no_grad():
            parameter.copy_(
                _random_weight(name, parameter, generator, gemma=kind.startswith("gemma"))
            )
    model.tie_weights()
    return model.eval().requires_grad_(False)


def _random_weight(
    name: str, like: torch.Tensor, generator: torch.Generator, *, gemma: bool
) -> torch.Tensor:
    noise = torch.randn(like.shape, generator=generator)
    if "norm" in name:
        gain = QK_NORM_GAIN if "q_norm" in name or "k_norm" in name else 1.0
        return gain + NORM_NOISE * noise - float(gemma)  # gemma multiplies by 1 + weight
    if name.endswith("bias"):
        return BIAS_STD * noise
    return INITIALIZER_RANGE * noise


def tiny_tokenizer(*, add_bos: bool = False) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with one token per UTF-8 byte: ASCII and α to φ.

    A Greek letter is two tokens, so cutting text at a token may cut a character. Byte-level BPE,
    because `AutoTokenizer` replaces the saved pre-tokenizer of qwen2 by that one whatever it was.
    `add_bos` puts `<s>` before every encoded text, as llama's and gemma's tokenizers do.
    """
    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *_byte_tokens()))}
    core = Tokenizer(models.BPE(vocab, merges=[], unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    if add_bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS_TOKEN_ID)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        additional_special_tokens=list(SPECIAL_TOKENS[4:]),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _byte_tokens() -> list[str]:
    """The symbols of byte-level BPE for the bytes of printable ASCII and of α to φ, each once."""
    greek = "αβγδεζηθικλμνξοπρστυφ".encode()
    return [_byte_symbol(b) for b in dict.fromkeys(b"\n\t" + bytes(range(32, 127)) + greek)]


def _byte_symbol(byte: int) -> str:
    """GPT-2's table: printable Latin-1 stands for itself, all others for U+0100 and up, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    if byte in printable:
        return chr(byte)
    return chr(0x100 + sum(other not in printable for other in range(byte)))


def save_tiny(
    kind: str,
    folder: str | Path,
    *,
    num_layers: int = NUM_LAYERS,
    seed: int = 0,
    add_bos: bool = False,
    **sizes: int,
) -> Path:
    """Write model (safetensors, config, generation config) and tokenizer; return the folder."""
    folder = Path(folder)
    tiny_model(kind, num_layers=num_layers, seed=seed, **sizes).save_pretrained(folder)
    tiny_tokenizer(add_bos=add_bos).save_pretrained(folder)
    return folder
