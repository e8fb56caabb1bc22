"""Times of the backends next to torch's attention, and of other tile sizes: what to change if the first is too slow."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from precache.bench.attention.measure import AttentionConfig, bench_attention
from precache.bench.attention.points import Heads, Point, make_problem
from precache.bench.attention.timing import seconds_per_call
from precache.ops.triton import Tiles, attend
from scripts.gpu_check.deadline import Deadline

LLAMA = Heads(32, 8, 128)
TILES = {
    "decode": [Tiles(16, n, w, s) for n in (32, 64, 128) for w in (2, 4) for s in (2, 3)],
    "prefill": [
        Tiles(m, n, w, s) for m in (64, 128) for n in (32, 64, 128) for w in (4, 8) for s in (2, 3)
    ],
}


def measure(device: torch.device, deadline: Deadline, *, tiny: bool) -> dict[str, Any]:
    """Rows as of `precache bench attention`, then tiles, as far as the time reaches."""
    rows: list[dict[str, Any]] = []
    ceilings: dict[str, Any] = {}
    for context in (64,) if tiny else (8192, 65536, 32768, 2048):
        if deadline.left() < 0:
            break
        report = bench_attention(_grid(device, context, tiny=tiny))
        rows += [asdict(row) for row in report.rows]
        ceilings = {name: asdict(found) for name, found in report.ceilings.items()}
    for row in rows:
        print(
            f"{row['kind']:<7} {row['context']:>6} rank {row['rank']:>3} {row['method']:<12} "
            f"{row['wall_s']['median'] * 1e3:>9.3f} ms {row['operations_per_s'] / 1e12:>7.1f} TFLOP/s "
            f"{row['bytes_per_s'] / 1e9:>7.0f} GB/s error {row['error']:.1e}"
        )
    return {"ceilings": ceilings, "rows": rows, "tiles": _sweep(device, deadline, tiny=tiny)}


def _grid(device: torch.device, context: int, *, tiny: bool) -> AttentionConfig:
    return AttentionConfig(
        heads=(Heads(4, 2, 16),) if tiny else (LLAMA, Heads(9, 3, 64)),
        contexts=(context,),
        ranks=(4,) if tiny else (8, 64),
        prefill=4 if tiny else 1024,
        longest_prefill=context,
        dtypes=("bfloat16",),
        backends=("triton", "cpu"),
        device=device.type,
        repeats=1 if tiny else 5,
        emulated=tiny,
    )


@torch.inference_mode()
def _sweep(device: torch.device, deadline: Deadline, *, tiny: bool) -> list[dict[str, Any]]:
    """Other tiles at one decode and one prefill point, fastest first."""
    rows = []
    for kind, choices in TILES.items():
        context, q_len = (40, 4) if tiny else (16384, 1024)
        heads = Heads(2, 1, 16) if tiny else LLAMA
        point = Point(heads, context, 1 if kind == "decode" else q_len, 8, torch.bfloat16)
        inputs = make_problem(point, device, seed=0).inputs
        for tiles in choices[: 1 if tiny else None]:
            if deadline.left() < 0:
                break
            try:
                attend(inputs, tiles)
            except (
                RuntimeError,
                ValueError,
            ) as error:  # too large for this GPU: part of the answer
                rows.append({"kind": kind, **asdict(tiles), "ms": None, "error": str(error)})
                continue
            seconds = seconds_per_call(
                lambda inputs=inputs, tiles=tiles: attend(inputs, tiles), 1 if tiny else 20, device
            ).wall_s
            rows.append({"kind": kind, **asdict(tiles), "ms": seconds * 1e3, "error": None})
    rows.sort(key=lambda row: (row["kind"], row["ms"] is None, row["ms"] or 0))
    for row in rows:
        print({name: value for name, value in row.items() if value is not None})
    return rows
