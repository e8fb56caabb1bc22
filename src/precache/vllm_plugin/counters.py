"""The plugin's counters on the engine core's side, and how they travel to the process that serves /metrics."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

PREFIX = "precache_"


@dataclass
class Counters:
    """Counted since the start. ``strip_bytes`` is what the strips' part of the cache holds, on one worker."""

    strip_bytes: int = 0
    reused_tokens: int = 0  # matched in blocks that another adapter wrote
    shadow_tokens: int = 0  # run once more without an adapter
    shadows_dropped: int = 0

    def put_into(self, stats: Any) -> None:
        """Add the counters to vLLM's SchedulerStats, which has no field for a plugin.

        `num_kv_fetch_reqs_by_stage` is its only open mapping of numbers that stays empty here (connectors are refused);
        SharingStatLogger takes them out again before any other logger looks.
        """
        stats.num_kv_fetch_reqs_by_stage.update(
            {PREFIX + name: value for name, value in asdict(self).items()}
        )


def take_from(stats: Any) -> Counters | None:
    """The counters that `put_into` added, removed from the stats; None when there are none."""
    mapping = stats.num_kv_fetch_reqs_by_stage
    found = {
        name.removeprefix(PREFIX): mapping.pop(name)
        for name in list(mapping)
        if name.startswith(PREFIX)
    }
    return Counters(**found) if found else None
