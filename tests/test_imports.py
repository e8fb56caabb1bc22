"""Who may import whom. Imports inside functions and under TYPE_CHECKING count too."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

SRC = Path(__file__).parents[1] / "src" / "precache"


class Rule(NamedTuple):
    """The parts of precache ("public" is `from precache import ...`) and the other packages that a part may import."""

    own: str
    others: str = ""


ENGINE = "engine config request chat ops cache adapters errors"
CLI = (
    "public cli demo bench fidelity agents server training tasks "
    "engine adapters config request chat access errors vllm_plugin.launch"
)
RULES = {
    "": Rule("config errors request engine.engine"),
    "__main__": Rule("cli"),
    "errors": Rule(""),
    "config": Rule("errors"),
    "access": Rule("errors"),
    "request": Rule("errors"),
    "tasks": Rule("tasks errors"),
    "ops": Rule("ops errors", "torch"),
    "ops.triton": Rule("ops errors", "torch triton"),
    "cache": Rule("cache errors", "torch numpy safetensors"),
    "adapters": Rule("adapters errors", "torch safetensors regex"),
    "chat": Rule("request errors", "transformers tokenizers jinja2"),
    "engine": Rule(ENGINE, "torch numpy safetensors"),
    "engine.policies": Rule("engine.policies cache adapters config errors", "torch"),
    "engine.model": Rule(ENGINE, "torch safetensors transformers"),
    "engine.hooks": Rule(ENGINE, "torch transformers"),
    "engine.checkpoints": Rule("errors", "torch transformers"),
    "training": Rule(
        "training tasks engine.checkpoints errors",
        "torch numpy safetensors transformers tokenizers peft tqdm",
    ),
    "bench": Rule(
        "public bench tasks ops engine cache adapters config request errors "
        "vllm_plugin.launch vllm_plugin.settings",
        "torch numpy safetensors transformers peft psutil tqdm",
    ),
    "fidelity": Rule(
        "public fidelity tasks agents.recorded engine adapters cache config request errors",
        "torch numpy safetensors jinja2",
    ),
    "fidelity.plots": Rule("fidelity", "matplotlib"),
    "agents": Rule("agents tasks request chat errors", "openai yaml numpy"),
    "demo": Rule("public demo agents tasks request errors", "tqdm"),
    "server": Rule(
        "public server chat config request access errors "
        "engine.engine engine.sampler engine.sessions cache.store adapters.bank",
        "torch numpy fastapi starlette uvicorn pydantic prometheus_client llguidance",
    ),
    "vllm_plugin": Rule(
        "vllm_plugin ops adapters cache config access errors", "torch vllm prometheus_client"
    ),
    "cli": Rule(CLI, "torch tqdm"),
    "cli.inspect": Rule(CLI, "transformers"),  # reads a model's config, never a model
    "cli.train": Rule(CLI, "transformers"),  # its loading bar
}


class Import(NamedTuple):
    importer: str
    target: str  # dotted, below precache for its own modules
    own: bool


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix("__init__").strip(".")


def imports_of(path: Path) -> Iterator[Import]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module or ""]
            if node.module == "precache":
                names = [f"precache.{a.name}" for a in node.names if is_module(a.name)]
                names += ["precache.public"] * (len(names) < len(node.names))
        else:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            own = name.split(".")[0] == "precache"
            yield Import(module_name(path), name.removeprefix("precache.") if own else name, own)


def is_module(name: str) -> bool:
    return (SRC / name).is_dir() or (SRC / f"{name}.py").is_file()


def within(name: str, parts: str) -> bool:
    return any(f"{name}.".startswith(f"{part}.") for part in parts.split())


def rule_of(module: str) -> Rule:
    if module == "":
        return RULES[""]
    found = [part for part in RULES if part and within(module, part)]
    assert found, f"{module}: no rule yet, add one to RULES"
    return RULES[max(found, key=len)]


def complaints(found: Import) -> str | None:
    rule = rule_of(found.importer)
    allowed = rule.own if found.own else rule.others
    stdlib = not found.own and found.target.split(".")[0] in sys.stdlib_module_names
    if stdlib or within(found.target, allowed):
        return None
    return f"{found.importer or 'precache'} imports {found.target}, allowed are: {allowed}"


FILES = sorted(SRC.rglob("*.py"))


def test_imports_follow_the_rules() -> None:
    found = [found for path in FILES for found in imports_of(path)]
    assert len(found) > 50
    assert [text for item in found if (text := complaints(item))] == []


@pytest.mark.parametrize(
    "wrong",
    [
        Import("request", "chat", own=True),
        Import("engine.policies.base", "engine.engine", own=True),
        Import("cache.store", "ops.cpu", own=True),
        Import("engine.turns", "transformers", own=False),
        Import("engine.engine", "cli.options", own=True),
        Import("errors", "torch", own=False),
        Import("cli.main", "tests.conftest", own=False),
        Import("engine.engine", "benchmarks", own=False),
    ],
    ids=lambda found: f"{found.importer}-{found.target}",
)
def test_a_wrong_import_is_found(wrong: Import) -> None:
    assert complaints(wrong) is not None


@pytest.mark.parametrize("module", ["precache", "precache.cli.main", "precache.cli.generate"])
def test_importing_it_does_not_import_torch(module: str) -> None:
    heavy = "{'torch', 'transformers', 'numpy'} & set(sys.modules)"
    code = f"import sys, {module}; sys.exit(str({heavy}) if {heavy} else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_engine_is_there_when_asked_for() -> None:
    import precache
    from precache.engine.engine import Engine

    assert precache.Engine is Engine
    assert set(precache.__all__) <= {*dir(precache), "Engine"}
