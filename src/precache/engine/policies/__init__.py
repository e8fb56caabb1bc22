"""The sharing policies by name."""

from __future__ import annotations

from precache.config import EngineConfig
from precache.engine.policies.base import SharingPolicy
from precache.engine.policies.baselrshared import BaseLRShared
from precache.engine.policies.baseshared import BaseShared
from precache.engine.policies.cacheblend import CacheBlend, RandomTokens
from precache.engine.policies.calibrated import Calibrated
from precache.engine.policies.droidspeak import DroidSpeak, DroidSpeakScattered, RandomLayers
from precache.engine.policies.fullshared import FullShared
from precache.engine.policies.nonshared import NonShared
from precache.engine.policies.prelrshared import PreLRShared
from precache.engine.policies.rebaseshared import ReBaseShared
from precache.engine.policies.relaycaching import RelayCaching
from precache.errors import UnknownPolicyError

__all__ = ["POLICIES", "SharingPolicy", "make_policy"]

POLICIES: dict[str, type[SharingPolicy]] = {
    policy.name: policy
    for policy in (
        NonShared,
        FullShared,
        BaseShared,
        BaseLRShared,
        PreLRShared,
        ReBaseShared,
        DroidSpeak,
        DroidSpeakScattered,
        CacheBlend,
        RelayCaching,
        RandomLayers,
        RandomTokens,
        Calibrated,
    )
}


def make_policy(
    name: str, schedule: str | None = None, config: EngineConfig | None = None
) -> SharingPolicy:
    """The policy of that name with that schedule and those settings (None: its defaults).

    Raises UnknownPolicyError, and ConfigError for settings that it cannot use.
    """
    if name not in POLICIES:
        raise UnknownPolicyError("policy", name, POLICIES)
    return POLICIES[name](schedule, config)
