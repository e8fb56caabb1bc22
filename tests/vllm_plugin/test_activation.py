"""An engine's configuration asks for the plugin, or does not; what cannot run is refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from precache.vllm_plugin.compat import IncompatibleVllmError, require_compatible
from precache.vllm_plugin.rejections import UnsupportedVllmSettingsError
from tests.vllm_plugin.engines import VLLM

pytestmark = VLLM


def configure(model: str, policy: str | None, **settings: Any) -> Any:
    """What vLLM makes of its arguments, without starting anything."""
    from vllm.engine.arg_utils import EngineArgs

    defaults: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "dtype": "float32"}
    if policy is not None:
        defaults["additional_config"] = {"precache": {"policy": policy}}
    return EngineArgs(model=model, **{**defaults, **settings}).create_engine_config()


def test_an_engine_that_does_not_ask_is_left_alone(model: str) -> None:
    config = configure(model, None)
    assert config.scheduler_config.scheduler_cls is None
    assert config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"


def test_an_engine_that_asks_runs_our_classes(model: str) -> None:
    config = configure(model, "prelrshared")
    assert config.scheduler_config.scheduler_cls.endswith(".SharingScheduler")
    assert config.parallel_config.worker_cls.endswith(".SharingCPUWorker")


def test_every_offending_setting_is_named_in_one_error(model: str) -> None:
    with pytest.raises(UnsupportedVllmSettingsError) as error:
        configure(
            model,
            "rebaseshared",
            enable_prefix_caching=False,
            max_cpu_loras=4,
            fully_sharded_loras=True,
            scheduler_cls="mine.Scheduler",
        )
    for named in ("enable_prefix_caching", "max_cpu_loras", "fully_sharded", "scheduler_cls"):
        assert named in str(error.value)
    assert len(error.value.problems) == 4


def test_another_vllm_is_refused_only_when_the_plugin_is_asked_for(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.33.1")
    configure(model, None)
    with pytest.raises(IncompatibleVllmError, match=r">=0\.32\.0,<0\.33: got vllm 0\.33\.1"):
        configure(model, "prelrshared")


def test_a_changed_signature_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    require_compatible()
    monkeypatch.setattr(Scheduler, "schedule", lambda self, other: None)
    monkeypatch.delattr(KVCacheManager, "pop_blocks_for_free")
    with pytest.raises(IncompatibleVllmError) as error:
        require_compatible()
    assert len(error.value.problems) == 2
    assert "Scheduler.schedule takes ['self', 'other']" in str(error.value)
    assert "pop_blocks_for_free is not there" in str(error.value)
