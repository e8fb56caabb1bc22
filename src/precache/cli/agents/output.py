"""What is shown: a bar on a terminal or a line per episode in a pipe, then the tables, and JSON at the end."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from precache.agents.results import EpisodeResult


def show(results: Iterable[EpisodeResult], label: str, total: int) -> None:
    """Run through the episodes and show how far they are."""
    from tqdm import tqdm

    is_terminal = sys.stderr.isatty()
    for result in tqdm(results, desc=label, total=total, unit="episode", disable=not is_terminal):
        if not is_terminal:
            print(_line(result), flush=True)


def _line(result: EpisodeResult) -> str:
    key, episode = result.key, result.episode
    if key.mode == "natural":
        said = f"{episode['outcome']}, answer {episode['answer']!r}"
    else:
        said = episode["error"] or "replayed"
    return f"{key.policy} {key.level} {key.question_id}: {said}, {result.seconds:.1f} s"


def report(results: Sequence[EpisodeResult], settings: Mapping[str, Any], *, as_json: bool) -> None:
    """Print the tables of both modes, as far as there are results of them; the JSON names the settings too."""
    from precache.agents.report import forced_rows, natural_rows
    from precache.agents.tables import format_forced, format_natural

    natural, forced = natural_rows(results), forced_rows(results)
    if natural:
        print("\n" + format_natural(natural))
    if forced:
        print("\n" + format_forced(forced))
    if as_json:
        rows = {"rows": [_row(row) for row in natural], "forced": [_row(r) for r in forced]}
        print(json.dumps({"settings": settings, **rows}))


def _row(row: Any) -> dict[str, Any]:
    """Return a row with its estimates as objects."""
    return {name: _plain(value) for name, value in asdict(row).items()}


def _plain(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        return value._asdict()
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value
