"""`additional_config["precache"]`, parsed: which policy a vLLM engine runs. Plain data; imports no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from precache.errors import ConfigError, UnknownPolicyError

CONFIG_KEY = "precache"
_FIELDS = ("policy", "experimental_cuda")


@dataclass(frozen=True)
class PluginPolicy:
    """What a policy asks of vLLM's paged cache; every part of the plugin looks at these and never at the name.

    ``shared``: blocks are matched across adapters. ``strips``: a block holds the base value and X A of every adapter,
    not one adapter's value. ``neutral``: only passes without an adapter are matched by others; an adapted pass keeps
    its blocks to itself, and a shadow pass publishes its tokens.
    """

    name: str
    shared: bool
    strips: bool
    neutral: bool


PLUGIN_POLICIES: Mapping[str, PluginPolicy] = {
    policy.name: policy
    for policy in (
        PluginPolicy("nonshared", shared=False, strips=False, neutral=False),
        PluginPolicy("fullshared", shared=True, strips=False, neutral=False),
        PluginPolicy("prelrshared", shared=True, strips=True, neutral=False),
        PluginPolicy("rebaseshared", shared=True, strips=True, neutral=True),
    )
}


@dataclass(frozen=True)
class PluginSettings:
    """What the user asked the plugin for. ``experimental_cuda`` lets it run on a GPU, where nobody has run it yet."""

    policy: PluginPolicy
    experimental_cuda: bool = False


def parse_settings(additional_config: object) -> PluginSettings | None:
    """The plugin's settings in vLLM's ``additional_config``; None when it does not ask for the plugin.

    Raises ConfigError or UnknownPolicyError for what cannot be read.
    """
    if not isinstance(additional_config, Mapping) or CONFIG_KEY not in additional_config:
        return None
    given: Any = additional_config[CONFIG_KEY]
    where = f"additional_config[{CONFIG_KEY!r}]"
    if not isinstance(given, Mapping):
        raise ConfigError(where, given, f"an object with the fields {list(_FIELDS)}")
    if unknown := sorted(set(given) - set(_FIELDS)):
        raise ConfigError(where, f"the unknown fields {unknown}", f"the fields {list(_FIELDS)}")
    experimental_cuda = given.get("experimental_cuda", False)
    if not isinstance(experimental_cuda, bool):
        raise ConfigError(f"{where}['experimental_cuda']", experimental_cuda, "true or false")
    return PluginSettings(find_policy(given.get("policy", "prelrshared")), experimental_cuda)


def find_policy(name: object) -> PluginPolicy:
    """A policy by its name. Raises UnknownPolicyError."""
    if not isinstance(name, str) or name not in PLUGIN_POLICIES:
        raise UnknownPolicyError("policy of the vLLM plugin", str(name), PLUGIN_POLICIES)
    return PLUGIN_POLICIES[name]
