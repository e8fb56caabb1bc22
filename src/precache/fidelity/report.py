"""What a comparison found, and the same as JSON. How it looks is in tables.py and page.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from precache.fidelity.advice import Advice
from precache.fidelity.layers import LayerPicture
from precache.fidelity.prediction import predict
from precache.fidelity.summary import Summary


@dataclass(frozen=True)
class Report:
    """``facts`` are settings, machine and versions (plain values); ``refused`` the policies left out, with reasons."""

    summary: Summary
    advice: Sequence[Advice]
    facts: Mapping[str, Any]
    refused: Mapping[str, str]
    picture: LayerPicture | None = None


def as_json(report: Report) -> dict[str, Any]:
    """Plain values; ``rows`` are those of FidelityRow."""
    summary, picture = report.summary, report.picture
    values = {
        "comparison": "fidelity",
        **report.facts,
        "rows": [asdict(row) for row in summary.rows()],
        "costs": [asdict(row) for row in summary.costs()],
        "differences": [_plain(asdict(row)) for row in summary.differences()],
        "recommendations": [_plain(asdict(item)) for item in report.advice],
        "refused": report.refused,
    }
    if picture is None:
        return values
    layers = {
        "rows": [asdict(row) for row in picture.rows()],
        "pairs": [_plain(asdict(row)) for row in picture.pairs()],
        "predictions": [_plain(asdict(item)) for item in predict(picture, summary)],
    }
    return {**values, "layers": layers}


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Intervals as objects, not lists."""
    return {
        name: value._asdict() if hasattr(value, "_asdict") else value
        for name, value in values.items()
    }
