"""The row ``llama-cpp``: llama.cpp's own server with one LoRA a request. Nothing of precache runs in it."""

from precache.bench.llama_cpp.player import LlamaCppPlayer, llama_cpp_player
from precache.bench.llama_cpp.tree import LlamaCppTree

__all__ = ["LlamaCppPlayer", "LlamaCppTree", "llama_cpp_player"]
