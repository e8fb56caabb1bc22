"""`precache serve`: the OpenAI-compatible server over one engine."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precache.access import API_KEY_VARIABLE, split_keys
from precache.cli.options import (
    add_engine_options,
    base_name,
    engine_from_args,
    quiet_in_pipes,
)
from precache.cli.values import given
from precache.errors import ConfigError

if TYPE_CHECKING:
    from precache import Engine
    from precache.server import ServerSettings

ADMIN_KEY_VARIABLE = "PRECACHE_ADMIN_KEY"
_PACKAGES = ("fastapi", "uvicorn", "llguidance", "prometheus_client")

_EXAMPLE = """examples:
  precache serve smollm2 --adapter plan=adapters/plan --adapter action=adapters/action
  precache serve smollm2 --engine vllm --policy rebaseshared --adapter plan=adapters/plan -- --max-num-seqs 8
  PRECACHE_API_KEY=... precache serve smollm2 --host 0.0.0.0 --adapter plan=adapters/plan

Every adapter is a model name, and so is the base model. http://127.0.0.1:8000/ shows the cache at work.
Keys given in PRECACHE_API_KEY (several: with commas) and PRECACHE_ADMIN_KEY do not show in the list of processes.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `serve`; the limits' defaults are those of ServerSettings."""
    parser = subparsers.add_parser(
        "serve",
        help="OpenAI-compatible server, one model name per adapter",
        description="Serve a base model and its adapters on one port, over one shared cache.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--engine",
        choices=("transformers", "vllm"),
        default="transformers",
        help="what runs the model (default: transformers); vllm: its own server, further flags of it after --",
    )
    parser.add_argument(
        "--print-command", action="store_true", help="with --engine vllm: print its command and end"
    )
    add_engine_options(parser)
    _add_server_options(parser)
    _add_limits(parser)
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object with url, models and policy once the port is open",
    )
    parser.set_defaults(func=run)


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("server").add_argument
    add("--host", help="address to listen on (default 127.0.0.1; others need an API key)")
    add("--port", type=int, help="default 8000; 0 takes a free one")
    add("--served-model-name", metavar="NAME", help="the base model's name (default: as given)")
    add("--api-key", action="append", default=[], metavar="KEY", help="repeatable")
    add("--admin-key", metavar="KEY", help="allows to load and unload adapters")
    add("--adapter-root", type=Path, metavar="FOLDER", help="adapters are loaded from here only")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("limits").add_argument
    add("--max-queue", type=int, metavar="N", help="requests that may wait (default 64)")
    add("--request-timeout", type=float, metavar="S", help="seconds for a request (default 600)")
    add("--shutdown-grace", type=float, metavar="S", help="seconds after SIGTERM (default 10)")
    add("--context-window", type=int, metavar="N", help="tokens (default: the model's own)")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes. Everything is checked before the model is loaded."""
    if args.engine == "vllm":
        from precache.cli import serve_vllm

        return serve_vllm.run(args, _api_keys(args))
    if args.passed_on or args.print_command:
        raise ConfigError("arguments after --, --print-command", "given", "with --engine vllm only")
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            "serve", f"no {', '.join(missing)}", "with the extra: pip install 'precache[server]'"
        )
    quiet_in_pipes()  # first: the server's modules import transformers
    from precache.server import build_app, run_app

    settings = settings_from_args(args)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    log = logging.getLogger(__name__)
    engine = _load(args)
    app = build_app(engine, settings)

    def ready(url: str) -> None:
        models, policy = app.state.service.models, engine.policy.name
        log.info("serving %s with %s: %s/v1", ", ".join(models), policy, url)
        if args.json:
            print(json.dumps({"url": url, "models": models, "policy": policy}), flush=True)

    run_app(app, settings, ready)
    return 0


def settings_from_args(args: argparse.Namespace) -> ServerSettings:
    """Build the checked settings; options left out keep the defaults. Raises ConfigError."""
    from precache.server import ServerSettings

    given: dict[str, Any] = {
        "host": args.host,
        "port": args.port,
        "adapter_root": args.adapter_root,
        "max_queue": args.max_queue,
        "request_timeout_s": args.request_timeout,
        "shutdown_grace_s": args.shutdown_grace,
        "admin_key": args.admin_key or os.environ.get(ADMIN_KEY_VARIABLE),
    }
    return ServerSettings(
        base_name=args.served_model_name or base_name(args.model),
        api_keys=tuple(_api_keys(args)),
        **{name: value for name, value in given.items() if value is not None},
    )


def _api_keys(args: argparse.Namespace) -> list[str]:
    given: list[str] = args.api_key
    return given or split_keys(os.environ.get(API_KEY_VARIABLE, ""))


def _load(args: argparse.Namespace) -> Engine:
    settings = given(args, ["context_window"])
    if args.policy == "rebaseshared" and args.schedule is None:
        settings["schedule"] = "idle-lazy-prefill"
    return engine_from_args(args, **settings)
