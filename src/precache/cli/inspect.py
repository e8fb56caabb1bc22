"""`precache inspect`: what adapter folders hold and which policies they allow. Owns the printing, not the facts."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from precache.errors import AdapterError, ModelError, PrecacheError

if TYPE_CHECKING:
    from precache.adapters.bank import Adapter
    from precache.adapters.report import AdapterSummary, ModuleGroup
    from precache.adapters.spec import ModelShape
    from precache.adapters.verdicts import PolicyVerdict

EXIT_ERROR = 2

_EXAMPLE = """examples:
  precache inspect adapters/plan
  precache inspect adapters/plan adapters/action adapters/reflect --model smollm2

Without --model the widths are read off the tensors; with it the adapter is checked against that model's config. Several
folders are also judged together: baselrshared needs the same A matrices in all of them.
"""


class _Model(NamedTuple):
    """What is known of the model: nothing without --model."""

    shape: ModelShape | None
    key_norms: bool


class _Found(NamedTuple):
    summary: AdapterSummary
    adapter: Adapter


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `inspect`."""
    parser = subparsers.add_parser(
        "inspect",
        help="what an adapter folder holds, and which sharing policies it allows",
        description="Show what PEFT LoRA folders hold and which sharing policies they allow.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="a PEFT LoRA adapter")
    parser.add_argument(
        "--model", help="check against this model: hub id, local folder, or the alias smollm2"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Inspect every folder; a bad one is reported on stderr and does not hide the others. Returns 2 then."""
    try:
        model = _read_model(args.model) if args.model else _Model(None, key_norms=False)
    except PrecacheError as error:
        return _fail(error)
    found: list[_Found] = []
    errors: dict[str, str] = {}
    for folder, name in zip(args.folders, _names(args.folders), strict=True):
        try:
            found.append(_inspect(folder, name, model))
        except AdapterError as error:
            errors[folder] = str(error)
            _fail(error)
    if args.json:
        print(json.dumps(_as_json(found, errors, model)))
    else:
        print("\n\n".join(_as_text(found, model)))
    return EXIT_ERROR if errors else 0


def _fail(error: PrecacheError) -> int:
    print(f"error: {error}", file=sys.stderr)
    return EXIT_ERROR


def _inspect(folder: str, name: str, model: _Model) -> _Found:
    from precache.adapters.report import inspect_adapter

    return _Found(*inspect_adapter(folder, name=name, shape=model.shape))


def _names(folders: Sequence[str]) -> list[str]:
    """The last part of each path, or the whole path where that is not unique."""
    short = [Path(folder).resolve().name for folder in folders]
    return [
        name if short.count(name) == 1 else folder
        for name, folder in zip(short, folders, strict=True)
    ]


def _read_model(name: str) -> _Model:
    """Read the config, never the weights. Raises ModelError."""
    from precache.cli.options import quiet_in_pipes

    quiet_in_pipes()
    from transformers import AutoConfig

    from precache.engine.checkpoints import hub_id, resolve_model
    from precache.engine.model import KEY_NORMS, model_shape_from_config

    path = resolve_model(name)
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"config of model {name!r} cannot be read: {error}") from error
    names = tuple(dict.fromkeys((hub_id(name), path, name)))
    return _Model(model_shape_from_config(config, names), config.model_type in KEY_NORMS)


def _verdicts(adapters: Sequence[Adapter], model: _Model) -> list[PolicyVerdict]:
    from precache.adapters.verdicts import allowed_policies

    return allowed_policies(adapters, key_norms=model.key_norms)


def _conditions(adapters: Sequence[Adapter]) -> list[str]:
    from precache.adapters.verdicts import model_conditions

    return list(model_conditions(adapters))


def _as_json(found: Sequence[_Found], errors: dict[str, str], model: _Model) -> dict[str, Any]:
    adapters = [item.adapter for item in found]
    return {
        "adapters": [
            asdict(item.summary)
            | {
                "policies": [asdict(verdict) for verdict in _verdicts([item.adapter], model)],
                "conditions": _conditions([item.adapter]),
            }
            for item in found
        ],
        "policies": [asdict(verdict) for verdict in _verdicts(adapters, model)] if found else [],
        "errors": [{"path": path, "error": error} for path, error in errors.items()],
    }


def _as_text(found: Sequence[_Found], model: _Model) -> list[str]:
    """One block of lines per adapter, and one for all together where there are several."""
    blocks = [_adapter_block(item, model) for item in found]
    if len(found) > 1:
        names = ", ".join(item.summary.name for item in found)
        verdicts = _verdicts([item.adapter for item in found], model)
        blocks.append("\n".join([f"together: {names}", *_policy_lines(verdicts)]))
    return blocks


def _adapter_block(item: _Found, model: _Model) -> str:
    summary = item.summary
    lines = [
        f"{summary.name}  ({summary.path})",
        f"  base        {summary.base or 'not named'}",
        f"  dtype       {', '.join(summary.dtypes)}",
        f"  parameters  {summary.num_parameters:,}",
        f"  digest      {summary.digest}",
        f"  {'module':<11} {'layers':<16} {'rank':<6} scaling",
        *(_module_line(group) for group in summary.modules),
        *_policy_lines(_verdicts([item.adapter], model)),
        *(f"  condition   {condition}" for condition in _conditions([item.adapter])),
        *(f"  warning     {warning}" for warning in summary.warnings),
    ]
    return "\n".join(lines)


def _module_line(group: ModuleGroup) -> str:
    from precache.adapters.matching import format_layers

    return (
        f"  {group.target:<11} {format_layers(group.layers):<16} {group.rank:<6} {group.scaling:g}"
    )


def _policy_lines(verdicts: Sequence[PolicyVerdict]) -> list[str]:
    allowed = [verdict.policy for verdict in verdicts if verdict.allowed]
    notes = [f"  {'':<11} {v.policy}: {v.reason}" for v in verdicts if v.allowed and v.reason]
    refused: dict[str, list[str]] = {}
    for verdict in verdicts:
        if not verdict.allowed:
            refused.setdefault(verdict.reason, []).append(verdict.policy)
    return [
        f"  allows      {', '.join(allowed) or 'no policy'}",
        *notes,
        *(f"  refuses     {', '.join(names)}: {reason}" for reason, names in refused.items()),
    ]
