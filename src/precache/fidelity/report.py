"""A comparison as one HTML file that needs nothing else: figures are inside, no script, no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from precache.fidelity.advice import Advice
from precache.fidelity.intervals import Interval
from precache.fidelity.layers import LayerPicture, LayerRow
from precache.fidelity.plots import (
    condition_by_layer,
    errors_by_layer,
    kl_by_flops,
    kl_by_policy,
)
from precache.fidelity.prediction import predict
from precache.fidelity.summary import ALL_ROLES, FidelityRow, Summary

_TEMPLATE = "report.html.j2"


@dataclass(frozen=True)
class Report:
    """What goes into the file; ``facts`` are settings, machine and versions (plain values)."""

    summary: Summary
    advice: Sequence[Advice]
    facts: Mapping[str, Any]
    refused: Mapping[str, str]
    picture: LayerPicture | None = None

    def html(self) -> str:
        """The whole file."""
        environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
        text = (files("precache.fidelity") / _TEMPLATE).read_text(encoding="utf-8")
        return environment.from_string(text).render(self._values())

    def _values(self) -> dict[str, Any]:
        summary = self.summary
        return {
            "facts": self.facts,
            "advice": self.advice,
            "refused": self.refused,
            "recordings": summary.comparison.recordings,
            "roles": (ALL_ROLES, *summary.roles),
            "shares": {role: summary.share_said(role) for role in summary.roles},
            "rows": [(row, _cells(row)) for row in summary.rows()],
            "costs": summary.costs(),
            "kl_figures": [kl_by_policy(summary, role) for role in (ALL_ROLES, *summary.roles)],
            "flops_figure": kl_by_flops(summary),
            "pairs": self.picture.pairs() if self.picture else [],
            "predictions": predict(self.picture, summary) if self.picture else [],
            "layer_figures": [
                (errors_by_layer(rows), condition_by_layer(rows)) for rows in self._by_pair()
            ],
        }

    def _by_pair(self) -> list[list[LayerRow]]:
        found: dict[tuple[str, str], list[LayerRow]] = {}
        for row in self.picture.rows() if self.picture else ():
            found.setdefault((row.writer, row.reader), []).append(row)
        return list(found.values())


def _cells(row: FidelityRow) -> tuple[str, ...]:
    return (
        Interval(row.kl, row.kl_low, row.kl_high).rounded(4),
        Interval(row.top1_agreement, row.top1_agreement_low, row.top1_agreement_high).rounded(3),
        Interval(row.nll, row.nll_low, row.nll_high).rounded(3),
        Interval(row.max_dlogit, row.max_dlogit_low, row.max_dlogit_high).rounded(2),
    )
