"""Options, order and result of the check; see ../gpu_check.sh."""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scripts.gpu_check.deadline import Deadline

PARTS = ("correctness", "speed", "turns")
_SPEED_SHARE = 0.25  # of the time, at most


def main() -> int:
    args = _arguments()
    if args.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    if not args.dry_run and not torch.cuda.is_available():
        print("no CUDA device here: use --dry-run to try the script itself", file=sys.stderr)
        return 2
    # Triton reads its environment when it is imported, which these do.
    from scripts.gpu_check import correctness, speed

    device = torch.device("cpu" if args.dry_run else "cuda")
    deadline = Deadline(args.seconds)
    result = _Result(args.out, {"check": "gpu", "dry_run": args.dry_run, **_machine(device)})
    if "correctness" in args.parts:
        result.add("correctness", correctness.check(device, tiny=args.dry_run))
    if "speed" in args.parts:
        part = Deadline(min(deadline.left(), _SPEED_SHARE * args.seconds))
        result.add("speed", speed.measure(device, part, tiny=args.dry_run))
    if "turns" in args.parts:
        if find_spec("transformers") is None:
            result.add("turns", {"skipped": "transformers is not installed"})
        else:
            from scripts.gpu_check import turns

            backend = "triton" if result.kernels_are_right() else "cpu"
            for found in turns.replay(device, deadline, backend, tiny=args.dry_run):
                result.add("turns", found)
    result.add("seconds", round(deadline.passed(), 1))
    print(json.dumps(result.facts))
    return 0 if result.kernels_are_right() else 1


class _Result:
    """The JSON object; written to its file whenever it grows, so that a time-out loses nothing."""

    def __init__(self, path: Path | None, facts: dict[str, Any]) -> None:
        self.facts = facts
        self._path = path

    def add(self, key: str, value: Any) -> None:
        self.facts[key] = value
        if self._path is not None:
            self._path.write_text(json.dumps(self.facts) + "\n", encoding="utf-8")

    def kernels_are_right(self) -> bool:
        return all(row["right"] for row in self.facts.get("correctness", []))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check.sh", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU, interpreted")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON object here, too")
    parser.add_argument("--seconds", type=float, default=450, help="time to fill (default: 450)")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=PARTS, help="what to run (default: all)"
    )
    return parser.parse_args()


def _machine(device: Any) -> dict[str, Any]:
    import torch
    import triton

    facts: dict[str, Any] = {"torch": torch.__version__, "triton": triton.__version__}
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        facts["gpu"] = found.name
        facts["gpu_memory"] = found.total_memory
        facts["compute_capability"] = [found.major, found.minor]
    return facts


if __name__ == "__main__":
    sys.exit(main())
