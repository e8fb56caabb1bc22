"""A built llama.cpp source tree: what it must hold, and its converters. Nothing here starts a server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from precache.errors import ConfigError, PrecacheError

SERVER = "build/bin/llama-server"
CONVERT_MODEL = "convert_hf_to_gguf.py"
CONVERT_ADAPTER = "convert_lora_to_gguf.py"
CONVERT_TIMEOUT_S = 1800.0


class ConversionError(PrecacheError):
    """llama.cpp's converter refused a model or an adapter."""


@dataclass(frozen=True)
class LlamaCppTree:
    """The folder of ``--llama-cpp``. Raises ConfigError for one without a built server or without converters."""

    folder: Path

    def __post_init__(self) -> None:
        parts = (SERVER, CONVERT_MODEL, CONVERT_ADAPTER)
        missing = [part for part in parts if not (self.folder / part).is_file()]
        if missing:
            raise ConfigError(
                "--llama-cpp",
                f"{self.folder} without {', '.join(missing)}",
                "a llama.cpp source tree in which llama-server was built (docs/benchmarks.md)",
            )
        if not os.access(self.folder / SERVER, os.X_OK):
            raise ConfigError("--llama-cpp", str(self.folder / SERVER), "an executable file")

    @property
    def server(self) -> Path:
        return (self.folder / SERVER).resolve()

    def version(self) -> str:
        """What the server says of itself, in one line."""
        said = subprocess.run(
            [self.server, "--version"], capture_output=True, text=True, timeout=60, check=True
        )
        return (said.stdout + said.stderr).partition("\n")[0]

    def convert_model(self, model: Path, target: Path, *, numbers: str, context: int) -> None:
        """Write a model folder as GGUF. Raises ConversionError.

        ``numbers`` is llama.cpp's name of a dtype. The server cuts every slot at the window that the model's config
        names, so the GGUF names at least ``context`` tokens: positions beyond the window take as long as others.
        """
        staged = target.with_suffix(".model")
        staged.mkdir()
        for file in model.iterdir():
            (staged / file.name).symlink_to(file.resolve())
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        config["max_position_embeddings"] = max(context, config["max_position_embeddings"])
        (staged / "config.json").unlink()
        (staged / "config.json").write_text(json.dumps(config), encoding="utf-8")
        self._convert(CONVERT_MODEL, staged, target, numbers)

    def convert_adapter(self, adapter: Path, target: Path, *, model: Path, numbers: str) -> None:
        """Write a PEFT folder as GGUF; ``model`` is the folder of its base. Raises ConversionError."""
        self._convert(CONVERT_ADAPTER, adapter, target, numbers, "--base", str(model))

    def _convert(self, script: str, source: Path, target: Path, numbers: str, *more: str) -> None:
        command = [sys.executable, str(self.folder / script), str(source), "--outfile", str(target)]
        done = subprocess.run(
            [*command, "--outtype", numbers, *more],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            timeout=CONVERT_TIMEOUT_S,
        )
        if done.returncode != 0 or not target.is_file():
            raise ConversionError(
                f"llama.cpp's {script} could not convert {source}: it ended with status {done.returncode}, saying:\n"
                f"{done.stderr[-2000:]}"
            )
