"""precache: LoRA agents on one backbone share one KV cache.

    from precache import Engine

    engine = Engine.load("smollm2", adapters={"plan": "adapters/plan"}, policy="prelrshared")
    out = engine.generate("plan", "Question: ...", max_tokens=64, stop=["\\n"])

Importing this package imports neither torch nor transformers; the engine does when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from precache.config import EngineConfig
from precache.errors import PrecacheError
from precache.request import GenerationChunk, GenerationOutput, SamplingParams, Timings, Usage

if TYPE_CHECKING:
    from precache.engine.engine import Engine

__all__ = [
    "Engine",
    "EngineConfig",
    "GenerationChunk",
    "GenerationOutput",
    "PrecacheError",
    "SamplingParams",
    "Timings",
    "Usage",
    "__version__",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from precache.engine.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
