"""Prometheus metrics: vLLM's names where it has one, ``precache:`` for what only a shared cache has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from precache.request import GenerationOutput

if TYPE_CHECKING:
    from precache.engine.engine import Engine
    from precache.engine.sessions import CacheStats, SessionInfo
    from precache.server.monitor import Snapshot

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_MODEL = ["model_name"]


class Metrics:
    """The counters of one server; ``model_name`` is the name that was asked for, base or adapter."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, labels: list[str]) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(name, text, _MODEL, buckets=_SECONDS, registry=registry)

        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens", _MODEL)
        self.generation_tokens = counter("vllm:generation_tokens", "Generated tokens", _MODEL)
        self.queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up", _MODEL)
        self.hits = counter("vllm:prefix_cache_hits", "Prompt tokens reused", _MODEL)
        self.success = counter(
            "vllm:request_success", "Turns that ended by themselves", [*_MODEL, "finished_reason"]
        )
        self.failed = counter("precache:turns_failed", "Turns cut by an error or a client", _MODEL)
        self.errors = counter(
            "precache:error_answers", "Answers of 400 and above", ["status", "reason"]
        )
        self.shared = counter(
            "precache:shared_tokens", "Prompt tokens reused that another agent wrote", _MODEL
        )
        self.catch_up = counter(
            "precache:catch_up_tokens", "Cached tokens run again for a reader's strip", _MODEL
        )
        self.ttft = histogram("vllm:time_to_first_token_seconds", "Time to first token, no queue")
        self.e2e = histogram("vllm:e2e_request_latency_seconds", "Whole turns, queue included")
        self.queue = histogram("vllm:request_queue_time_seconds", "Time in the queue")
        self.neutral_wait = histogram(
            "precache:neutral_wait_seconds", "Part of TTFT spent on another turn's neutral pass"
        )

    def turn_finished(self, model: str, queue_s: float, output: GenerationOutput) -> None:
        """Count a turn that ended by itself."""
        usage, timings = output.usage, output.timings
        self.prompt_tokens.labels(model).inc(usage.prompt_tokens)
        self.generation_tokens.labels(model).inc(usage.completion_tokens)
        self.queries.labels(model).inc(usage.prompt_tokens)
        self.hits.labels(model).inc(usage.cached_tokens)
        self.shared.labels(model).inc(usage.shared_tokens)
        self.catch_up.labels(model).inc(usage.catch_up_tokens)
        self.success.labels(model, output.finish_reason).inc()
        self.ttft.labels(model).observe(timings.ttft_s)
        self.e2e.labels(model).observe(queue_s + timings.total_s)
        self.queue.labels(model).observe(queue_s)
        self.neutral_wait.labels(model).observe(timings.neutral_wait_s)

    def turn_failed(self, model: str) -> None:
        """Count a turn that was cut."""
        self.failed.labels(model).inc()

    def error_answered(self, status: int, reason: str) -> None:
        """Count an answer that is an error, whether its request became a turn or not."""
        self.errors.labels(str(status), reason).inc()

    def page(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)


class StateCollector(Collector):
    """What the engine and the queue hold now, read when Prometheus asks."""

    def __init__(
        self, engine: Engine, snapshot: Callable[[], Snapshot], queue: Callable[[], tuple[int, int]]
    ) -> None:
        self._engine = engine
        self._snapshot = snapshot
        self._queue = queue

    def collect(self) -> Iterator[Metric]:
        running, waiting = self._queue()
        yield _gauge("vllm:num_requests_running", "Requests in the engine", running)
        yield _gauge("vllm:num_requests_waiting", "Requests in the queue", waiting)
        snapshot = self._snapshot()
        stats = snapshot.stats
        share = stats.bytes_held / stats.budget
        yield _gauge("vllm:kv_cache_usage_perc", "Cache bytes, 1 is the budget", share)
        yield self._adapters()
        yield from _cache(stats)
        yield _bytes_by_part(snapshot.sessions)

    def _adapters(self) -> Metric:
        names = ",".join(self._engine.agents()[1:])
        info = GaugeMetricFamily(
            "vllm:lora_requests_info", "Loaded adapters", labels=["available_lora_adapters"]
        )
        info.add_metric([names], 1)
        return info


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _cache(stats: CacheStats) -> Iterator[Metric]:
    yield _gauge("precache:cache_bytes", "Bytes of all cached tensors", stats.bytes_held)
    yield _gauge("precache:cache_peak_bytes", "Most bytes ever held", stats.peak_bytes)
    yield _gauge("precache:cache_budget_bytes", "The limit of cached bytes", stats.budget)
    yield _gauge("precache:sessions", "Cached trajectories", stats.sessions)
    lookups = CounterMetricFamily(
        "precache:lookups", "Lookups by outcome: hit, or why it was none", labels=["reason"]
    )
    for reason, count in stats.lookups.items():
        lookups.add_metric([reason], count)
    yield lookups
    for name, text, value in (
        ("precache:reused_tokens", "Tokens found in the cache", stats.reused_tokens),
        ("precache:evictions", "Trajectories dropped for want of room", stats.evictions),
        ("precache:neutral_tokens", "Tokens run with adapters off", stats.neutral_tokens),
    ):
        yield CounterMetricFamily(name, text, value=value)


def _bytes_by_part(sessions: tuple[SessionInfo, ...]) -> Metric:
    parts = GaugeMetricFamily(
        "precache:cache_part_bytes",
        "Bytes by part: base K and V, strips, hidden states",
        labels=["part"],
    )
    for part, size in bytes_by_part(sessions).items():
        parts.add_metric([part], size)
    return parts


def bytes_by_part(sessions: tuple[SessionInfo, ...]) -> dict[str, int]:
    """Bytes of the base K and V, of strips by their readers, of hidden states, and of running turns' own K and V."""
    parts = {"base": 0}
    for session in sessions:
        parts["base"] += session.base_bytes
        rest = session.bytes - session.base_bytes
        for strip in session.strips:
            readers = "+".join(strip.readers) or "unused"
            name = f"strip {readers}" if strip.kind == "strip" else strip.kind
            if strip.bytes:  # a strip may be nothing but the record of what was run
                parts[name] = parts.get(name, 0) + strip.bytes
            rest -= strip.bytes
        if rest > 0:
            parts["private"] = parts.get("private", 0) + rest
    return parts
