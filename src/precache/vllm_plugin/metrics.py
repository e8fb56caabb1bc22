"""The plugin's counters as Prometheus metrics, beside vLLM's own.

`SharingStatLogger` is the entry point of the group `vllm.stat_logger_plugins`: vLLM makes one per engine in its server.
"""

from __future__ import annotations

from typing import Any, ClassVar

from prometheus_client import Counter, Gauge
from vllm.v1.metrics.loggers import StatLoggerBase

from precache.vllm_plugin.counters import Counters, take_from
from precache.vllm_plugin.settings import parse_settings

_COUNTERS = {
    "reused_tokens": "Prompt tokens found in cache blocks that another adapter wrote.",
    "shadow_tokens": "Tokens run once more without an adapter, to publish what adapted turns wrote.",
    "shadows_dropped": "Shadow passes that were given up.",
}


class SharingStatLogger(StatLoggerBase):
    """One engine's counters; nothing for engines without the plugin."""

    _metrics: ClassVar[dict[str, Any]] = {}

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._engine = str(engine_index)
        self._seen = Counters()
        if parse_settings(vllm_config.additional_config) is not None and not self._metrics:
            self._metrics.update(_make_metrics())

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        now = None if scheduler_stats is None else take_from(scheduler_stats)
        if now is None:
            return
        for name in _COUNTERS:
            grown = getattr(now, name) - getattr(self._seen, name)
            self._metrics[name].labels(engine=self._engine).inc(grown)
        self._metrics["strip_bytes"].labels(engine=self._engine).set(now.strip_bytes)
        self._seen = now

    def log_engine_initialized(self) -> None:
        """Nothing to say: vLLM logs the configuration."""


def _make_metrics() -> dict[str, Any]:
    metrics: dict[str, Any] = {
        name: Counter(f"precache:{name}", text, ["engine"]) for name, text in _COUNTERS.items()
    }
    metrics["strip_bytes"] = Gauge(
        "precache:lr_cache_bytes", "Bytes of the KV cache that hold strips, per worker.", ["engine"]
    )
    return metrics
