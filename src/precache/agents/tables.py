"""Rows -> the tables that people read, in the form of the paper's: a row a policy, a column a level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from precache.agents.report import ForcedRow, NaturalRow
from precache.agents.statistics import Estimate

_WIDTH = 30


def format_natural(rows: Sequence[NaturalRow]) -> str:
    """Return a table per score, one of costs, and what went wrong."""
    names = list(dict.fromkeys(name for row in rows for name in row.scores))
    blocks = [_score_table(rows, name) for name in names]
    return "\n\n".join([*blocks, _cost_table(rows), _trouble(rows)])


def format_forced(rows: Sequence[ForcedRow]) -> str:
    """Return the table of forced mode; drops are against nonshared on the same text."""
    lines = [
        "forced mode: agents were made to say recorded text (95 % CI over episodes)",
        f"{'policy':<14}{'level':<10}{'episodes':>8}{'turns kept %':>22}{'answers kept %':>22}"
        f"{'NLL nats/token':>22}{'top-1 %':>22}{'s/turn':>8}",
    ]
    for row in rows:
        nll = "-" if row.nll is None else _interval(row.nll, 1, 3)
        top1 = "-" if row.top1 is None else _interval(row.top1)
        lines.append(
            f"{row.policy:<14}{row.level:<10}{row.episodes:>8}{_interval(row.turns_kept):>22}"
            f"{_interval(row.answers_kept):>22}{nll:>22}{top1:>22}{row.seconds_per_turn:>8.2f}"
        )
    by_role = [
        f"{row.policy:<14}{row.level:<10}NLL by role: "
        + ", ".join(f"{role} {nll:.3f}" for role, nll in row.nll_by_role.items())
        for row in rows
        if row.nll_by_role
    ]
    return "\n".join([*lines, *([""] if by_role else []), *by_role, *_forced_drops(rows)])


def _score_table(rows: Sequence[NaturalRow], name: str) -> str:
    levels = list(dict.fromkeys(row.level for row in rows))
    by_key = {(row.policy, row.level): row for row in rows}
    lines = [
        f"{name} %: mean ±std over repeats [95 % CI over questions]",
        f"{'policy':<14}" + "".join(f"{level:>{_WIDTH}}" for level in levels),
    ]
    for policy in dict.fromkeys(row.policy for row in rows):
        cells = [by_key.get((policy, level)) for level in levels]
        lines.append(f"{policy:<14}" + "".join(_cell(row, name) for row in cells))
        if any(row is not None and row.drops for row in cells):
            lines.append(f"{'  drop':<14}" + "".join(_drop_cell(row, name) for row in cells))
    return "\n".join(lines)


def _cell(row: NaturalRow | None, name: str) -> str:
    if row is None or name not in row.scores:
        return f"{'-':>{_WIDTH}}"
    found = row.scores[name]
    text = f"{100 * found.mean:.1f} ±{100 * found.std:.1f} {_bounds(found)}"
    return f"{text:>{_WIDTH}}"


def _drop_cell(row: NaturalRow | None, name: str) -> str:
    text = "-" if row is None or name not in row.drops else _interval(row.drops[name])
    return f"{text:>{_WIDTH}}"


def _cost_table(rows: Sequence[NaturalRow]) -> str:
    lines = [
        f"{'policy':<14}{'level':<10}{'episodes':>9}{'steps':>7}{'turns':>7}{'tokens':>8}"
        f"{'TTFT s/turn':>13}"
        f"{'tok/s':>8}{'cached %':>10}"
    ]
    for row in rows:
        speed = "-" if row.tokens_per_s is None else f"{row.tokens_per_s:.1f}"
        tokens = "-" if row.tokens is None else f"{row.tokens:.0f}"
        cached = "-" if row.cached_share is None else f"{100 * row.cached_share:.1f}"
        lines.append(
            f"{row.policy:<14}{row.level:<10}{row.episodes:>9}{row.steps:>7.1f}{row.turns:>7.1f}"
            f"{tokens:>8}"
            f"{row.ttft_s:>13.3f}{speed:>8}{cached:>10}"
        )
    return "\n".join(lines)


def _trouble(rows: Sequence[NaturalRow]) -> str:
    lines = ["how episodes ended; malformed outputs; answers of tools"]
    for row in rows:
        counts = (row.outcomes, row.malformed, row.tools)
        texts = "; ".join(_counts(count) for count in counts)
        lines.append(f"{row.policy:<14}{row.level:<10}{texts}")
    return "\n".join(lines)


def _forced_drops(rows: Sequence[ForcedRow]) -> list[str]:
    lines = [
        f"{row.policy:<14}{row.level:<10}drop: "
        + ", ".join(
            f"{name} {_interval(drop, 1, 3) if name == 'nll' else _interval(drop)}"
            for name, drop in row.drops.items()
        )
        for row in rows
        if row.drops
    ]
    return ["", *lines] if lines else []


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in counts.items()) or "none"


def _interval(found: Estimate, scale: float = 100, digits: int = 1) -> str:
    return f"{scale * found.mean:.{digits}f} {_bounds(found, scale, digits)}"


def _bounds(found: Estimate, scale: float = 100, digits: int = 1) -> str:
    return f"[{scale * found.low:.{digits}f}, {scale * found.high:.{digits}f}]"
