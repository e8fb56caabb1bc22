"""Predicted against measured: the formulas of precache.bench.physics beside a result of `precache bench turns --json`.

    python benchmarks/predict_turns.py benchmarks/results/turns-2048.json

Prints a Markdown table. Operations are those up to the first token, over all turns; the rates are what the measured
processor time makes of them. Rows that the formulas do not cover are left out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from precache.bench.adapters import LORA_RANK, agent_names
from precache.bench.physics import METHODS, LoraSize, ModelSize, predict
from precache.bench.shapes import model_config
from precache.bench.trace import LONG_DECODE, controlled_trace
from precache.engine.checkpoints import resolve_model

STOCK = {"stock-peft": "nonshared"}  # does what nonshared does
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


def main() -> None:
    """Read the file and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("result", type=Path, help="the JSON of `precache bench turns`")
    found = json.loads(parser.parse_args().result.read_text(encoding="utf-8").splitlines()[-1])
    settings = found["settings"]
    if settings["adapters"] != "random":
        parser.error(
            "the formulas take one rank: got a run with --adapter, allowed are random ones"
        )
    size = ModelSize.of(model_config(resolve_model(settings["model"])))
    print(
        "| chunk | policy | Gop to first tokens | /fullshared | CPU time /fullshared "
        "| Gop per CPU s | decode GB read | GB per CPU s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in found["rows"]:
        if STOCK.get(row["policy"], row["policy"]) in METHODS:
            print(line(row, size, settings))


def line(row: dict[str, Any], size: ModelSize, settings: dict[str, Any]) -> str:
    """One row of the table."""
    names = agent_names(row["agents"])
    decode, rank = settings.get("decode", LONG_DECODE), settings.get("rank", LORA_RANK)
    trace = controlled_trace(row["chunk"], names, rounds=settings["rounds"], decode=decode)
    lora = LoraSize(len(names), rank)
    itemsize = ITEMSIZE[settings["dtype"]]

    def predicted(policy: str) -> Any:
        return predict(size, lora, METHODS[STOCK.get(policy, policy)], trace, itemsize)

    own, full = predicted(row["policy"]), predicted("fullshared")
    ratio = row["ttft_cpu_ratio"].get("fullshared", {}).get("median")
    return (
        f"| {row['chunk']} | {row['policy']} | {own.ttft_flops / 1e9:.0f} "
        f"| {own.ttft_flops / full.ttft_flops:.2f} | {'-' if ratio is None else f'{ratio:.2f}'} "
        f"| {own.ttft_flops / 1e9 / row['ttft_cpu_s']:.1f} | {own.decode_bytes / 1e9:.0f} "
        f"| {own.decode_bytes / 1e9 / row['decode_cpu_s']:.1f} |"
    )


if __name__ == "__main__":
    main()
