"""The vLLM plugin: one KV cache for all LoRA adapters on vLLM's own engine.

`register` is the entry point of the group `vllm.general_plugins`. vLLM calls it in each of its processes; it changes
nothing for an engine whose `additional_config` has no "precache".
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Let vLLM's configuration ask for the plugin. May be called any number of times."""
    from precache.vllm_plugin.activation import watch_configuration

    watch_configuration()
