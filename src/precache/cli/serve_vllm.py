"""`precache serve --engine vllm`: checks the options, prints vLLM's own command, and becomes it."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
from typing import Any

from precache.access import API_KEY_VARIABLE, check_key, is_loopback
from precache.cli.options import POLICY_SETTINGS, adapters_from_args, base_name
from precache.cli.values import flag
from precache.errors import ConfigError

# Options of the embedded server, and what to use in their place.
_NOT_HERE = {
    "admin_key": "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and a key",
    "adapter_root": "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1; vLLM has no such limit",
    "max_queue": "vLLM's own flags after --",
    "request_timeout": "vLLM's own flags after --",
    "shutdown_grace": "-- --shutdown-timeout SECONDS",
    "device": "a vLLM that was built for the device",
    **dict.fromkeys(POLICY_SETTINGS, "none: the plugin has no policy that needs it"),
    "json": "the first line of stdout is vLLM's command",
}


def run(args: argparse.Namespace, api_keys: list[str]) -> int:
    """Replace this process by vLLM's server, or only print its command. Raises PrecacheError before."""
    command = command_from_args(args, api_keys)
    if not args.print_command:
        _require_plugin()
    print(shlex.join(command), flush=True)
    if args.print_command:
        return 0
    environment = dict(os.environ)
    if api_keys:  # in the environment: arguments show in the list of processes
        environment[API_KEY_VARIABLE] = ",".join(api_keys)
        environment.pop("VLLM_API_KEY", None)  # vLLM would ask for that one as well
    os.execve(command[0], command, environment)


def _require_plugin() -> None:
    """vLLM is there, and will load the plugin: it would run as stock vLLM otherwise, and say nothing."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("--engine", "vllm, which is not installed", "as in docs/vllm.md")
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is not None and "precache" not in chosen.split(","):
        raise ConfigError("VLLM_PLUGINS", chosen, "unset, or a list with precache in it")


def command_from_args(args: argparse.Namespace, api_keys: list[str]) -> list[str]:
    """vLLM's command line. Raises ConfigError for every option that vLLM's server has no counterpart of."""
    from precache.config import parse_size
    from precache.engine.checkpoints import resolve_model
    from precache.vllm_plugin.launch import Launch, vllm_command

    for name, instead in _NOT_HERE.items():
        value = getattr(args, name)
        if value is not None and value is not False:  # 0 is a value too
            raise ConfigError(flag(name), value, f"with --engine vllm: {instead}")
    if args.schedule not in (None, "double-batch"):
        raise ConfigError("--schedule", args.schedule, "double-batch with --engine vllm")
    _check_passed_on(args.passed_on)
    for key in api_keys:
        check_key("--api-key", key)
    host = args.host or Launch.host
    if not api_keys and not is_loopback(host):
        raise ConfigError("--host", host, "a loopback address unless an API key is set")
    chosen: dict[str, Any] = {"policy": args.policy, "port": args.port}
    return vllm_command(
        Launch(
            model=resolve_model(args.model),
            adapters=adapters_from_args(args),
            served_name=args.served_model_name or base_name(args.model),
            host=host,
            dtype=args.dtype,
            max_model_len=args.context_window,
            cache_bytes=None if args.cache_memory is None else parse_size(args.cache_memory),
            guarded=bool(api_keys),
            extra=tuple(args.passed_on),
            **{name: value for name, value in chosen.items() if value is not None},
        )
    )


def _check_passed_on(passed_on: list[str]) -> None:
    """Refuse what is checked before the dashes, abbreviated or not (vLLM takes --hos and --api_key too)."""
    for given in passed_on:
        typed = given.split("=")[0].replace("_", "-")
        for option in ("--host", "--api-key"):
            if len(typed) > len("--h") and option.startswith(typed):
                raise ConfigError(option, "after --", "before --, where the two are checked")
