"""A calibration with fewer directions or fewer layers, cut out of a bigger one: what does each kept number gain?

    python benchmarks/cut_calibration.py corrections.safetensors cut.safetensors --rank 8 --layers 10-29

The directions of a fit come strongest first, so the first 8 of 16 are what a fit with --rank 8 would have found; a
layer that is left out is not corrected.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file


def cut(source: Path, target: Path, rank: int, layers: range) -> None:
    """Write to ``target`` the first ``rank`` directions of the layers in ``layers``."""
    with safe_open(source, framework="pt") as file:
        facts = json.loads(file.metadata()["precache"])
        tensors = {name: file.get_tensor(name) for name in list(file.keys())}
    if not 1 <= rank <= facts["rank"]:
        raise SystemExit(f"--rank: got {rank}, allowed is 1 to {facts['rank']}")
    kept = {}
    for name, tensor in tensors.items():
        kind, layer = name.split(".")[:2]
        if int(layer) in layers:
            part = tensor[:, :rank] if kind == "p" else tensor[:rank]
            kept[name] = part.contiguous()
    if not kept:
        raise SystemExit(f"--layers: got {layers}, of which the calibration corrects none")
    save_file(kept, target, {"precache": json.dumps(facts | {"rank": rank}, sort_keys=True)})


def _layers(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--layers", type=_layers, default=range(1 << 30), metavar="FIRST-LAST")
    arguments = parser.parse_args()
    cut(arguments.source, arguments.target, arguments.rank, arguments.layers)


if __name__ == "__main__":
    main()
