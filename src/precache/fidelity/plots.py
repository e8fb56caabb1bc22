"""Small SVG figures of a comparison. Owns matplotlib; each figure is narrow enough for a telephone."""

from __future__ import annotations

import html
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from precache.fidelity.intervals import Interval
from precache.fidelity.layers import LayerRow
from precache.fidelity.replay import EXACT
from precache.fidelity.summary import ALL_ROLES, Summary

_WIDTH = 4.4  # inches
_SMALLEST_SCALE = 1e-3  # nats; less is not worth a figure of its own scale
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: small files, and fonts of the page
    "svg.hashsalt": "precache",  # the same figure is the same file
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e3e3",
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
}
# Okabe and Ito's colours, which colour-blind readers can tell apart.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c6d31")
_WRITER, _NEUTRAL = _COLOURS[1], _COLOURS[0]


def kl_by_policy(summary: Summary, role: str) -> str:
    """One role: KL of every policy with its interval."""
    policies = [policy for policy in summary.policies if policy != EXACT]
    with _figure(0.9 + 0.28 * len(policies)) as (figure, axes):
        for row, policy in enumerate(policies):
            _dot(axes, summary.kl(policy, role), row, _colour(summary, policy))
        axes.set_yticks(range(len(policies)), policies)
        axes.set_ylim(len(policies) - 0.5, -0.5)
        axes.set_xlim(0, max(axes.get_xlim()[1], _SMALLEST_SCALE))
        axes.set_xlabel("KL to nonshared, nats per token")
        who = "all roles" if role == ALL_ROLES else role
        axes.set_title(f"{who}: {summary.tokens_said(role)} tokens")
        return _svg(figure, f"KL by policy for {who}")


def kl_by_flops(summary: Summary) -> str:
    """What fidelity costs: KL over all roles against FLOPs."""
    costs = {row.policy: row.flops_ratio for row in summary.costs()}
    with _figure(3.0) as (figure, axes):
        for policy, ratio in costs.items():
            kl = summary.kl(policy, ALL_ROLES)
            axes.errorbar(
                [ratio], [kl.value], yerr=_errors(kl), fmt="o", capsize=3,
                color=_colour(summary, policy), label=policy,
            )  # fmt: skip
        axes.set_xlim(0, max(1.08, *costs.values()))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("FLOPs over nonshared's")
        axes.set_ylabel("KL, nats per token")
        axes.set_title("Cost and fidelity, all roles")
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
        return _svg(figure, "KL against FLOPs by policy")


def errors_by_layer(rows: Sequence[LayerRow]) -> str:
    """One pair of roles: relative error of the reader's hidden state and of k and v_base, from either base."""
    writer, reader = rows[0].writer, rows[0].reader
    layers = [row.layer for row in rows]
    with _figure(3.0) as (figure, axes):
        for style, part, name in (
            ("-", "hidden", "hidden state"),
            ("--", "k", "k"),
            (":", "v_base", "v_base"),
        ):
            errors = [getattr(row, part) for row in rows]
            axes.plot(
                layers, [e.writer for e in errors], style, color=_WRITER, label=f"{name}, writer's"
            )
            axes.plot(
                layers, [e.neutral for e in errors], style, color=_NEUTRAL, label=f"{name}, neutral"
            )
        axes.set_ylim(bottom=0)
        _layer_axis(axes)
        axes.set_ylabel("relative error")
        axes.set_title(f"{writer} wrote, {reader} reads")
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=7)
        return _svg(figure, f"error by layer where {writer} wrote and {reader} reads")


def condition_by_layer(rows: Sequence[LayerRow]) -> str:
    """One pair of roles: rho and 2 cos(theta); where rho lies above, the neutral base is closer."""
    writer, reader = rows[0].writer, rows[0].reader
    deep = [row for row in rows if row.hidden.neutral > 0]
    layers = [row.layer for row in deep]
    with _figure(2.4) as (figure, axes):
        rho, bound = [row.rho for row in deep], [2 * row.cosine for row in deep]
        axes.plot(
            layers, rho, "-", color=_COLOURS[2], label="rho = |writer offset| / |reader offset|"
        )
        axes.plot(layers, bound, "--", color="#555555", label="2 cos(theta)")
        above = [high >= low for high, low in zip(rho, bound, strict=True)]
        axes.fill_between(
            layers, rho, bound, where=above, color=_NEUTRAL, alpha=0.15, label="neutral base closer"
        )
        _layer_axis(axes)
        axes.set_title("Neutral-base condition")
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=7)
        return _svg(figure, f"neutral-base condition where {writer} wrote and {reader} reads")


def _layer_axis(axes: Axes) -> None:
    axes.set_xlabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _dot(axes: Axes, value: Interval, row: int, colour: str) -> None:
    axes.errorbar([value.value], [row], xerr=_errors(value), fmt="o", color=colour, capsize=3)


def _errors(value: Interval) -> list[list[float]] | None:
    if value.low is None or value.high is None:
        return None
    return [[max(0.0, value.value - value.low)], [max(0.0, value.high - value.value)]]


def _colour(summary: Summary, policy: str) -> str:
    others = [name for name in summary.policies if name != EXACT]
    return "#777777" if policy == EXACT else _COLOURS[others.index(policy) % len(_COLOURS)]


@contextmanager
def _figure(height: float) -> Iterator[tuple[Figure, Axes]]:
    """A figure with one pair of axes, in our style."""
    with mpl.rc_context(rc=_STYLE):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        yield figure, figure.subplots()


def _svg(figure: Figure, title: str) -> str:
    """The figure as an <svg> element that scales with its column."""
    text = io.StringIO()
    metadata: Mapping[str, Any] = {"Date": None, "Title": title}
    figure.savefig(text, format="svg", metadata=metadata)
    _, start, rest = text.getvalue().partition("<svg ")
    return f'{start}role="img" aria-label="{html.escape(title)}" {rest}'
