"""Options that several commands share, and what they are turned into. Defaults stay where the Engine has them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precache.cli.values import flag, given
from precache.config import EngineConfig
from precache.errors import ConfigError

if TYPE_CHECKING:
    from precache import Engine

DEMO_ROLES = ("plan", "action", "reflect")
POLICY_SETTINGS = (
    "recompute_share",
    "recompute_profile",
    "recompute_seed",
    "recompute_again",
    "calibration",
)  # what some policies need
_ENGINE_SETTINGS = ("policy", "schedule", "dtype", "cache_memory", "device", *POLICY_SETTINGS)


def adapter_pair(text: str) -> tuple[str, Path]:
    """Parse ``name=path``; an argparse type."""
    name, separator, path = text.partition("=")
    if not (name and separator and path):
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed is NAME=FOLDER")
    return name, Path(path)


def add_adapter_option(
    group: argparse._ActionsContainer,
    help: str = "a PEFT LoRA adapter and the name of its agent; repeatable",
) -> None:
    """Add --adapter; ``adapters_from_args`` reads it."""
    group.add_argument(
        "--adapter",
        dest="adapters",
        type=adapter_pair,
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help=help,
    )


def add_engine_options(parser: argparse.ArgumentParser, *, model: bool = True) -> None:
    """Add the model (unless the command brings its own), the adapters and the engine's settings."""
    if model:
        parser.add_argument(
            "model", metavar="MODEL", help="hub id, local folder, or the alias smollm2"
        )
    group = parser.add_argument_group("engine")
    add_adapter_option(group)
    add = group.add_argument
    add("--policy", help="what agents share (prelrshared, rebaseshared, nonshared, ...)")
    add("--schedule", help="when rebaseshared runs its neutral pass (lazy-prefill, ...)")
    add("--dtype", help="auto, float32, bfloat16 or float16")
    add("--device", help="auto, cpu, cuda or mps")
    add("--cache-memory", metavar="SIZE", help="hard limit of all cached bytes, such as 2GiB")
    add_policy_options(group)


def add_policy_options(group: argparse._ActionsContainer) -> None:
    """Add what some policies need: a share and layers to recompute, and corrections."""
    group.add_argument(
        "--recompute-share",
        type=float,
        metavar="SHARE",
        help="most of the k and v that droidspeak, cacheblend and relaycaching replace (0.3)",
    )
    group.add_argument(
        "--recompute-profile",
        type=Path,
        metavar="FILE",
        help="their layers, as precache compare --profile writes them",
    )
    group.add_argument(
        "--recompute-seed",
        type=int,
        metavar="SEED",
        help="draws what random-layers and random-tokens replace (0)",
    )
    group.add_argument(
        "--recompute-again",
        action="store_true",
        default=None,
        help="replace a token again whenever another reader has done so since",
    )
    group.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="the corrections of calibrated, as precache compare --calibrate writes them",
    )


def base_name(model: str) -> str:
    """What a server calls the model without an adapter: a hub id or an alias as it is, a folder by its last name."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def adapters_from_args(args: argparse.Namespace) -> dict[str, Path]:
    """Return the adapters by name. Raises ConfigError if a name was given twice."""
    adapters: dict[str, Path] = {}
    for name, path in args.adapters:
        if name in adapters:
            raise ConfigError("--adapter", name, "each name once")
        adapters[name] = path
    return adapters


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine settings that were given; those left out keep the engine's defaults."""
    return given(args, _ENGINE_SETTINGS)


def refuse_unread(args: argparse.Namespace, policies: Sequence[str]) -> None:
    """Raise ConfigError if a setting was given that none of the policies reads."""
    settings = given(args, POLICY_SETTINGS)
    if not settings:
        return
    from precache.engine.policies import POLICIES

    for name, value in settings.items():
        readers = [policy for policy, method in POLICIES.items() if name in method.settings]
        if not set(readers) & set(policies):
            allowed = f"only with a policy that reads it: {', '.join(readers)}"
            raise ConfigError(flag(name), value, allowed)


def engine_from_args(args: argparse.Namespace, **settings: Any) -> Engine:
    """Load the engine that the options of ``add_engine_options`` and ``settings`` describe. Raises PrecacheError."""
    adapters = adapters_from_args(args)
    refuse_unread(args, [args.policy or EngineConfig.policy])
    quiet_in_pipes()
    from precache import Engine

    return Engine.load(args.model, adapters=adapters, **engine_settings(args), **settings)


def quiet_in_pipes() -> None:
    """No progress bar of the model loader where nobody watches it. Call before transformers is imported."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@contextmanager
def demo_adapters() -> Iterator[dict[str, Path]]:
    """The folders of the adapters that come with precache, by role."""
    with as_file(files("precache.demo") / "adapters") as folder:
        yield {role: folder / role for role in DEMO_ROLES}
