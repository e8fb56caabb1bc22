"""A report as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from precache.fidelity.intervals import Interval
from precache.fidelity.layers import LayerPicture
from precache.fidelity.prediction import predict
from precache.fidelity.report import Report
from precache.fidelity.summary import CostRow, FidelityRow, Summary


def as_text(report: Report) -> str:
    """Rows by policy and role, costs, layers if measured, and what follows from them."""
    summary = report.summary
    recordings = summary.comparison.recordings
    lines = [
        f"{len(recordings)} trajectories, {sum(len(r.turns) for r in recordings)} turns. Brackets are 95 % bootstrap "
        "intervals over trajectories.",
        "KL(nonshared || policy) and the NLL of the recorded text in nats per token said, by the role that reads.",
        "",
        f"{'policy':<20} {'role':<10} {'tokens':>6}  {'KL':<24} {'top-1':<22} {'NLL':<24} {'max |dlogit|'}",
        *(_fidelity_line(row) for row in summary.rows()),
        "",
        f"{'policy':<20} {'tokens run':>10} {'recomputed':>10} {'k, v replaced':>13} {'GFLOPs':>8} "
        f"{'/nonshared':>10} {'cache MB':>8} {'/nonshared':>10}",
        *(_cost_line(row) for row in summary.costs()),
        "",
        *(_layer_lines(report.picture, summary) if report.picture else ()),
        *(item.sentence for item in report.advice),
        *(f"left out: {reason}" for reason in report.refused.values()),
    ]
    return "\n".join(lines)


def _layer_lines(picture: LayerPicture, summary: Summary) -> Iterator[str]:
    yield "Error from the writer's cache over that from the neutral one (above 1: neutral is closer), all layers:"
    yield (
        f"{'writer':<10} {'reader':<10} {'tokens':>6}  {'hidden':<21} {'k':<21} {'v_base':<21} "
        "rho >= 2 cos  right for k, v_base"
    )
    for pair in picture.pairs():
        yield (
            f"{pair.writer:<10} {pair.reader:<10} {pair.tokens:>6}  {pair.hidden_ratio.rounded(3):<21} "
            f"{pair.k_ratio.rounded(3):<21} {pair.v_base_ratio.rounded(3):<21} "
            f"{pair.expected:>5} of {pair.layers:<2}  {pair.k_right:>6} and {pair.v_base_right} of {pair.layers}"
        )
    for item in predict(picture, summary):
        yield (
            f"{item.reader}: the condition expects {item.expected} ({item.neutral_share:.0%} for neutral), measured "
            f"{item.measured or 'undecided'} (KL prelrshared - rebaseshared {item.difference})"
        )
    yield ""


def _fidelity_line(row: FidelityRow) -> str:
    kl = Interval(row.kl, row.kl_low, row.kl_high)
    nll = Interval(row.nll, row.nll_low, row.nll_high)
    top1 = Interval(row.top1_agreement, row.top1_agreement_low, row.top1_agreement_high)
    largest = Interval(row.max_dlogit, row.max_dlogit_low, row.max_dlogit_high)
    return (
        f"{row.policy:<20} {row.role:<10} {row.tokens:>6}  {kl!s:<24} {top1.rounded(3):<22} "
        f"{nll.rounded(3):<24} {largest.rounded(2)}"
    )


def _cost_line(row: CostRow) -> str:
    return (
        f"{row.policy:<20} {row.tokens_run:>10.0f} {row.tokens_recomputed:>10.0f} {row.kv_refreshed:>13.0f} "
        f"{row.flops / 1e9:>8.0f} {row.flops_ratio:>10.3f} {row.cache_bytes / 1e6:>8.2f} {row.cache_bytes_ratio:>10.3f}"
    )
