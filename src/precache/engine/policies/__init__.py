"""The sharing policies by name."""

from __future__ import annotations

from precache.engine.policies.base import SharingPolicy
from precache.engine.policies.baselrshared import BaseLRShared
from precache.engine.policies.baseshared import BaseShared
from precache.engine.policies.fullshared import FullShared
from precache.engine.policies.nonshared import NonShared
from precache.engine.policies.prelrshared import PreLRShared
from precache.engine.policies.rebaseshared import ReBaseShared
from precache.errors import UnknownPolicyError

__all__ = ["POLICIES", "SharingPolicy", "make_policy"]

POLICIES: dict[str, type[SharingPolicy]] = {
    policy.name: policy
    for policy in (NonShared, FullShared, BaseShared, BaseLRShared, PreLRShared, ReBaseShared)
}


def make_policy(name: str, schedule: str | None = None) -> SharingPolicy:
    """The policy of that name with that schedule (None: its default). Raises UnknownPolicyError."""
    if name not in POLICIES:
        raise UnknownPolicyError("policy", name, POLICIES)
    return POLICIES[name](schedule)
