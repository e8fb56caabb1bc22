"""Who plays: a client per policy, over an engine in this process or over one endpoint."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from precache.cli.agents.inputs import DEFAULT_MODEL
from precache.cli.options import (
    DEMO_ROLES,
    POLICY_SETTINGS,
    adapters_from_args,
    demo_adapters,
    engine_settings,
    quiet_in_pipes,
    refuse_unread,
)
from precache.cli.values import flag, split_names
from precache.errors import ConfigError

if TYPE_CHECKING:
    from precache import Engine
    from precache.agents.client import CompletionClient
    from precache.agents.results import EpisodeResult, ResultsFile
    from precache.agents.workflow import Workflow

API_KEY_VARIABLE = "OPENAI_API_KEY"
NO_KEY = "none"  # the client package wants one, whether the endpoint does or not

_IN_PROCESS = (
    "adapters",
    "model",
    "schedule",
    "dtype",
    "device",
    "cache_memory",
    *POLICY_SETTINGS,
)
_AT_ENDPOINTS = ("api_key", "model_names", "endpoint_timeout")


def check(args: argparse.Namespace) -> None:
    """Refuse options of the other kind of player: none is accepted and then ignored."""
    others = _IN_PROCESS if args.base_url else _AT_ENDPOINTS
    for name in others:
        value = getattr(args, name)
        if value not in (None, []):
            where = "with" if args.base_url else "without"
            raise ConfigError(
                flag(name.removesuffix("s")), _shown(name, value), f"none {where} --base-url"
            )


def _shown(option: str, value: Any) -> str:
    if option == "api_key":
        return "a key"
    return ", ".join(name for name, _ in value) if isinstance(value, list) else str(value)


def policies(args: argparse.Namespace) -> list[str]:
    """The policies to run, or the one name for an endpoint's. Raises ConfigError."""
    if args.policy and args.policies:
        raise ConfigError("--policies", args.policies, "either --policy or --policies")
    text = args.policies or args.policy or ("endpoint" if args.base_url else "rebaseshared")
    names = list(dict.fromkeys(split_names(text)))
    if args.base_url:
        if len(names) != 1:
            raise ConfigError(
                "--policies",
                text,
                "one name with --base-url: a server has one policy; "
                "run once per server with the same --out",
            )
        return names
    from precache.engine.policies import POLICIES

    if not names or set(names) - set(POLICIES):
        raise ConfigError("--policies", text, f"names among {sorted(POLICIES)}")
    refuse_unread(args, names)
    return names


def clients(
    args: argparse.Namespace, workflow: Workflow, names: Sequence[str], stack: ExitStack
) -> Iterator[tuple[str, CompletionClient]]:
    """Yield each policy with the client that plays under it, one after the other."""
    from precache.agents import EngineClient, HttpClient

    if args.base_url:
        key = args.api_key or os.environ.get(API_KEY_VARIABLE) or NO_KEY
        models = {role: str(name) for role, name in args.model_names}
        timeout = {} if args.endpoint_timeout is None else {"timeout_s": args.endpoint_timeout}
        yield names[0], HttpClient(args.base_url, api_key=key, models=models, **timeout)
        return
    loaded = stack.enter_context(_engine(args, workflow, names[0], stack))
    for policy in names:
        engine = loaded if policy == names[0] else loaded.with_policy(policy, args.schedule)
        yield policy, EngineClient(engine)
        engine.reset()


def _engine(args: argparse.Namespace, workflow: Workflow, policy: str, stack: ExitStack) -> Engine:
    adapters, model = adapters_from_args(args), args.model or DEFAULT_MODEL
    if not adapters and model == DEFAULT_MODEL and set(workflow.roles) == set(DEMO_ROLES):
        print("no --adapter given: the demo's adapters (trained on ScienceQA) are used", flush=True)
        adapters = stack.enter_context(demo_adapters())
    if missing := [role for role in workflow.roles if role not in {*adapters, "base"}]:
        raise ConfigError("--adapter", sorted(adapters), f"one for each of the roles {missing} too")
    quiet_in_pipes()
    from precache import Engine

    return Engine.load(model, adapters=adapters, **{**engine_settings(args), "policy": policy})


def episodes(
    args: argparse.Namespace,
    workflow: Workflow,
    policy: str,
    client: CompletionClient,
    items: Sequence[Any],
    results: ResultsFile,
) -> Iterator[EpisodeResult]:
    """Play questions, or replay recorded episodes, and yield the results. Raises EndpointError."""
    from precache.agents.runner import run_forced, run_natural
    from precache.agents.web_search import WebSearch
    from precache.cli.agents import inputs

    if args.mode == "forced":
        return run_forced(workflow, client, policy, items, results)
    return run_natural(
        workflow,
        client,
        policy,
        items,
        results,
        inputs.options(args),
        corpus=inputs.corpus(args, workflow),
        search=WebSearch(args.search_url) if args.search_url else None,
    )
