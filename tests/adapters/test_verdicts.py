"""The verdicts speak of exactly the policies that the engine has."""

from __future__ import annotations

from precache.adapters.verdicts import ALWAYS_ALLOWED, CALIBRATED, COMMON_A
from precache.engine.policies import POLICIES


def test_every_policy_has_a_verdict() -> None:
    assert {*ALWAYS_ALLOWED, CALIBRATED, COMMON_A} == set(POLICIES)
