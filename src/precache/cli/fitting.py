"""The files that `precache compare` measures for the engine: a recompute profile, a calibration."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precache.cli.values import flag, given, names
from precache.errors import ConfigError

if TYPE_CHECKING:
    from precache import Engine
    from precache.fidelity.recordings import Progress, Recording

_OF_PROFILE = ("stride",)
_OF_CALIBRATE = ("rank", "ridge", "first_layer")
_OF_COMPARING = ("policies", "html", "layers")


def add_fitting_options(parser: argparse.ArgumentParser) -> None:
    """Add --profile and --calibrate, and what belongs to them."""
    add = parser.add_argument_group(
        "writing files for the engine, instead of comparing"
    ).add_argument
    add("--profile", metavar="NAME,NAME", help="choose layers: droidspeak, droidspeak-scattered")
    add("--stride", type=int, help="of the layers that --profile tries (default: 1, all)")
    add("--calibrate", action="store_true", help="fit the corrections of the policy calibrated")
    add("--rank", type=int, help="of --calibrate: numbers a token, layer and reader (default: 16)")
    add("--ridge", type=float, help="of --calibrate, relative to X (default: 0.01)")
    add(
        "--first-layer",
        type=int,
        metavar="N",
        help="of --calibrate: correct from layer N on (default: 1)",
    )
    add("--out", type=Path, metavar="FILE", help="what --profile or --calibrate writes")


def is_fitting(args: argparse.Namespace) -> bool:
    return args.calibrate or args.profile is not None


def check_fitting(args: argparse.Namespace) -> None:
    """Raise ConfigError for options that would be ignored, or a file that could not be written at the end."""
    if args.calibrate and args.profile is not None:
        raise ConfigError("--profile", args.profile, "either --profile or --calibrate")
    _refuse(args, () if args.profile is not None else _OF_PROFILE, "given with --profile")
    _refuse(args, () if args.calibrate else _OF_CALIBRATE, "given with --calibrate")
    _refuse(args, _OF_COMPARING if is_fitting(args) else ("out",), _instead(args))
    if args.stride is not None and args.stride < 1:
        raise ConfigError("--stride", args.stride, "an integer from 1")
    if is_fitting(args):
        check_writable("--out", args.out)


def check_writable(option: str, path: Path | None) -> None:
    """Raise ConfigError unless a file can be there: now, not at the end of a long run."""
    if path is None or not path.absolute().parent.is_dir() or path.is_dir():
        raise ConfigError(
            option, None if path is None else str(path), "a file in a folder that exists"
        )


def _instead(args: argparse.Namespace) -> str:
    return (
        "given when comparing only" if is_fitting(args) else "given with --profile or --calibrate"
    )


def _refuse(args: argparse.Namespace, names: Sequence[str], allowed: str) -> None:
    for name in names:
        value = getattr(args, name)
        if value is not None and value is not False:  # 0 is a value too
            raise ConfigError(flag(name), str(value), allowed)


def fit(
    args: argparse.Namespace,
    engine: Engine,
    recordings: Sequence[Recording],
    progress: Progress,
) -> int:
    """Measure, write the file, and say what is in it."""
    run = _calibrate if args.calibrate else _profile
    values = {"file": str(args.out), **run(args, engine, recordings, progress)}
    if args.json:
        print(json.dumps(values))
    return 0


def _calibrate(
    args: argparse.Namespace,
    engine: Engine,
    recordings: Sequence[Recording],
    progress: Progress,
) -> dict[str, Any]:
    from precache.fidelity.calibrate import CalibrationConfig, calibrate

    config = CalibrationConfig(**given(args, _OF_CALIBRATE))
    found = calibrate(engine, recordings, config, progress)
    found.save(args.out, engine)
    explained = {name: found.explained(name) for name in engine.bank.names}
    print(f"{args.out}: rank {found.rank}, fitted on {found.tokens} tokens of text")
    for name, share in explained.items():
        print(f"{name}: {share:.1%} of what it misses in others' rows is predicted, on this text")
    return {
        "rank": found.rank,
        "ridge": config.ridge,
        "first_layer": config.first_layer,
        "tokens": found.tokens,
        "explained": explained,
    }


def _profile(
    args: argparse.Namespace,
    engine: Engine,
    recordings: Sequence[Recording],
    progress: Progress,
) -> dict[str, Any]:
    from precache.fidelity.profile import as_file, profile_layers

    found = [
        profile_layers(engine, name, recordings, progress, stride=args.stride or 1)
        for name in dict.fromkeys(names("--profile", args.profile))
    ]
    as_file(engine, found, len(recordings)).save(args.out)
    for profile in found:
        worst, best = max(profile.kl.values()), min(profile.kl.values())
        print(
            f"{profile.policy}: layers {', '.join(map(str, profile.layers))}; KL of the "
            f"{len(profile.kl)} candidates from {best:.4f} to {worst:.4f} nats per token"
        )
    return {"layers": {profile.policy: list(profile.layers) for profile in found}}
