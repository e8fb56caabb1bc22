"""Which layers the selective-recompute policies run: a JSON file (docs/policies.md has the format).

Owns the file: `precache compare --profile` writes it, the policies read it. Whether it fits a model and a budget is
checked by the policy that uses a section.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from precache.errors import ConfigError

FORMAT = "precache-recompute-1"
MAX_BYTES = 1 << 20
# The fields of a policy's section.
SECTIONS = {
    "droidspeak": ("layers",),
    "droidspeak-scattered": ("layers",),
    "relaycaching": ("start", "detection", "end"),
}
_FIELDS = ("format", "num_layers", "policies", "made_by")


@dataclass(frozen=True)
class RecomputeProfile:
    """Sections by policy name, for a model of ``num_layers`` layers. ``made_by`` is free: how it was measured."""

    num_layers: int
    policies: Mapping[str, Mapping[str, Any]]
    made_by: Mapping[str, Any] = field(default_factory=dict)

    def save(self, path: str | Path) -> None:
        """Write the file. Raises ConfigError if it could not be read back, OSError if it cannot be written."""
        text = json.dumps(
            {
                "format": FORMAT,
                "num_layers": self.num_layers,
                "policies": self.policies,
                "made_by": self.made_by,
            },
            indent=2,
        )
        _checked(json.loads(text), str(path))
        Path(path).write_text(text + "\n", encoding="utf-8")


def load_profile(path: str | Path) -> RecomputeProfile:
    """Read a profile. Raises ConfigError, naming what is wrong with the file."""
    name = str(path)
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError("recompute_profile", name, f"a readable file ({error})") from error
    if len(data) > MAX_BYTES:
        raise ConfigError("recompute_profile", name, f"a file of at most {MAX_BYTES} bytes")
    try:
        facts = json.loads(data)
    except ValueError as error:
        raise ConfigError("recompute_profile", name, f"JSON ({error})") from error
    return _checked(facts, name)


def _checked(facts: object, path: str) -> RecomputeProfile:
    if not isinstance(facts, dict) or set(facts) - {"made_by"} != set(_FIELDS) - {"made_by"}:
        got = sorted(facts) if isinstance(facts, dict) else type(facts).__name__
        raise _wrong(path, "fields", got, f"{list(_FIELDS)}")
    if facts["format"] != FORMAT:
        raise _wrong(path, "format", facts["format"], repr(FORMAT))
    num_layers, made_by = facts["num_layers"], facts.get("made_by", {})
    if type(num_layers) is not int or num_layers < 1:
        raise _wrong(path, "num_layers", num_layers, "an integer of at least 1")
    if not isinstance(made_by, dict):
        raise _wrong(path, "made_by", made_by, "an object")
    if not isinstance(facts["policies"], dict):
        raise _wrong(path, "policies", facts["policies"], f"sections among {list(SECTIONS)}")
    for policy, section in facts["policies"].items():
        _check_section(path, policy, section, num_layers)
    return RecomputeProfile(num_layers, facts["policies"], made_by)


def _check_section(path: str, policy: str, section: object, num_layers: int) -> None:
    if policy not in SECTIONS:
        raise _wrong(path, "policies", policy, f"sections among {list(SECTIONS)}")
    if not isinstance(section, dict) or set(section) != set(SECTIONS[policy]):
        raise _wrong(path, policy, section, f"the fields {list(SECTIONS[policy])}")
    layers = section["layers"] if "layers" in section else list(section.values())
    if not isinstance(layers, list) or not layers:
        raise _wrong(path, f"{policy}.layers", layers, "a list of layers")
    if any(type(layer) is not int or not 0 <= layer < num_layers for layer in layers):
        raise _wrong(path, policy, section, f"layers from 0 to {num_layers - 1}")
    if "layers" in section and sorted(set(layers)) != layers:
        raise _wrong(path, f"{policy}.layers", layers, "ascending layers, each once")
    if policy == "droidspeak" and layers[-1] - layers[0] + 1 != len(layers):
        raise _wrong(path, f"{policy}.layers", layers, "consecutive layers")
    if policy == "relaycaching" and not (section["start"] < section["detection"] <= section["end"]):
        raise _wrong(path, policy, section, "start < detection <= end")


def _wrong(path: str, what: str, got: object, allowed: str) -> ConfigError:
    return ConfigError(f"recompute_profile {path}: {what}", got, allowed)
