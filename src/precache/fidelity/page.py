"""A report as one HTML file that needs nothing else: figures are inside, no script, no network."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from precache.fidelity.intervals import Interval
from precache.fidelity.layers import LayerRow
from precache.fidelity.plots import (
    condition_by_layer,
    errors_by_layer,
    kl_by_flops,
    kl_by_policy,
)
from precache.fidelity.prediction import predict
from precache.fidelity.report import Report
from precache.fidelity.summary import ALL_ROLES, FidelityRow

_TEMPLATE = "report.html.j2"


def as_html(report: Report) -> str:
    """The whole file."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    text = (files("precache.fidelity") / _TEMPLATE).read_text(encoding="utf-8")
    return environment.from_string(text).render(_values(report))


def _values(report: Report) -> dict[str, Any]:
    summary = report.summary
    return {
        "facts": report.facts,
        "advice": report.advice,
        "refused": report.refused,
        "recordings": summary.comparison.recordings,
        "roles": (ALL_ROLES, *summary.roles),
        "shares": {role: summary.share_said(role) for role in summary.roles},
        "rows": [(row, _cells(row)) for row in summary.rows()],
        "costs": summary.costs(),
        "kl_figures": [kl_by_policy(summary, role) for role in (ALL_ROLES, *summary.roles)],
        "flops_figure": kl_by_flops(summary),
        "pairs": report.picture.pairs() if report.picture else [],
        "predictions": predict(report.picture, summary) if report.picture else [],
        "layer_figures": [
            (errors_by_layer(rows), condition_by_layer(rows)) for rows in _by_pair(report)
        ],
    }


def _by_pair(report: Report) -> list[list[LayerRow]]:
    found: dict[tuple[str, str], list[LayerRow]] = {}
    for row in report.picture.rows() if report.picture else ():
        found.setdefault((row.writer, row.reader), []).append(row)
    return list(found.values())


def _cells(row: FidelityRow) -> tuple[str, ...]:
    return (
        Interval(row.kl, row.kl_low, row.kl_high).rounded(4),
        Interval(row.top1_agreement, row.top1_agreement_low, row.top1_agreement_high).rounded(3),
        Interval(row.nll, row.nll_low, row.nll_high).rounded(3),
        Interval(row.max_dlogit, row.max_dlogit_low, row.max_dlogit_high).rounded(2),
    )
