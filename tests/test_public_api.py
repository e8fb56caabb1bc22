"""The names that users import, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import precache
from precache import errors


@pytest.mark.parametrize("name", precache.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(precache, name) is not None


def test_the_public_names() -> None:
    assert set(precache.__all__) == {
        "Engine",
        "EngineConfig",
        "GenerationChunk",
        "GenerationOutput",
        "PrecacheError",
        "SamplingParams",
        "Timings",
        "Usage",
        "__version__",
    }


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        precache.Motor  # noqa: B018


def test_every_error_is_a_precache_error_and_is_explained() -> None:
    found = [item for item in vars(errors).values() if isinstance(item, type)]
    raised = [item for item in found if item.__module__ == errors.__name__]
    assert len(raised) > 20
    for error in raised:
        assert issubclass(error, precache.PrecacheError)
        assert error.__doc__
        assert error.__name__ in (errors.__doc__ or "") or error is precache.PrecacheError


def test_importing_precache_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, precache, precache.errors, precache.request, precache.config;"
        "print([m for m in ('torch', 'transformers', 'peft', 'numpy') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
