"""vLLM's scheduler with cache keys that all adapters share, and with shadow passes where the policy wants them.

Owns when a request may run (its adapter is resident), under which key its blocks are hashed, and which blocks become
visible to others. What a shadow pass is and when it runs is in shadows.py; which adapters are resident in adapters.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from precache.vllm_plugin.activation import install_core_hooks
from precache.vllm_plugin.adapters import ResidentAdapters
from precache.vllm_plugin.counters import Counters
from precache.vllm_plugin.hashing import BlockHasher, clear_key, set_key
from precache.vllm_plugin.settings import parse_settings
from precache.vllm_plugin.shadows import ShadowPublisher
from precache.vllm_plugin.strips import strip_bytes

_logger = logging.getLogger(__name__)

install_core_hooks()


class SharingScheduler(Scheduler):
    """vLLM's scheduler under a policy of the plugin, for engines that run one step after the other."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = parse_settings(self.vllm_config.additional_config)
        assert settings is not None, "only engines that ask for the plugin get this scheduler"
        (group,) = self.kv_cache_config.kv_cache_groups
        self.sharing = settings.policy
        self.counters = Counters(
            strip_bytes=strip_bytes(group.kv_cache_spec)
            * self.kv_cache_config.num_blocks
            * len(group.layer_names)
        )
        self.adapters = ResidentAdapters(
            settings.policy,
            num_slots=self.vllm_config.lora_config.max_loras,
            in_use=self._adapters_in_use,
            on_change=self._on_new_generation,
        )
        self.shadows = ShadowPublisher(self, self.counters) if settings.policy.neutral else None
        self._stock_hasher: BlockHasher | None = None
        self._writers: dict[int, int] = {}  # block id -> id of the adapter that wrote it
        self._watch_publishing()

    # --- requests come ---------------------------------------------------------------------------

    def add_request(self, request: Any) -> None:
        if request.request_id not in self.requests:
            self._stock_hasher = self._stock_hasher or request._block_hasher
            clear_key(request)
            if request.lora_request is not None:
                # The scheduler loads, once; the workers must not load again at every step.
                request.lora_request.load_inplace &= not self.adapters.holds(request.lora_request)
            self._admit(request)
        super().add_request(request)

    def _admit(self, request: Any) -> bool:
        """Make the request's adapter resident and give it a key; a request whose adapter cannot be loaded fails."""
        try:
            admitted = self.adapters.admit(request.lora_request)
        except Exception:
            # Whatever the workers raise: it ends this request with an error, and no other.
            name = request.lora_request.lora_name
            _logger.exception("request %s: adapter %r is unusable", request.request_id, name)
            self.grammar_compile_error_reqs.add(request.request_id)
            return False
        if admitted:
            self._give_key(request)
        return admitted

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        if request.request_id in self.grammar_compile_error_reqs:
            return False
        if self.shadows is not None and self.shadows.is_dropped(request):
            return False
        if not self.adapters.holds(request.lora_request) and not self._admit(request):
            return False
        ready: bool = super()._handle_blocked_waiting_request(request)
        return ready

    def _adapters_in_use(self) -> set[int]:
        return {r.lora_request.lora_int_id for r in self.requests.values() if r.lora_request}

    # --- keys ------------------------------------------------------------------------------------

    def _give_key(self, request: Any) -> None:
        if self._stock_hasher is not None:
            set_key(request, self._stock_hasher, self.adapters.cache_key(request.lora_request))

    def _on_new_generation(self) -> None:
        """Requests that have not run yet look for blocks of the new generation; running ones keep what they have."""
        for request in self.requests.values():
            if request.num_computed_tokens == 0 and self.adapters.holds(request.lora_request):
                self._give_key(request)
        if self.shadows is not None:
            self.shadows.drop_all()

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        if self.shadows is not None:
            self.shadows.on_preempted(request)
        super()._preempt_request(request, *args, **kwargs)
        self._give_key(request)

    # --- a step ----------------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self.shadows is not None:
            self.shadows.abort_dropped()
        output = super().schedule(*args, **kwargs)
        for request, num_reused, block_ids in self._admitted_now(output):
            self._count_reuse(request, num_reused, block_ids)
            if self.shadows is not None:
                self.shadows.on_admitted(request, num_reused)
        if self.shadows is not None:
            output.precache_moves = self.shadows.moves_of(output.num_scheduled_tokens)
        return output

    def _admitted_now(self, output: Any) -> Iterator[tuple[Any, int, list[int]]]:
        """Requests that start or resume in this step, the tokens they reuse, and their blocks."""
        for new in output.scheduled_new_reqs:
            yield self.requests[new.req_id], new.num_computed_tokens, new.block_ids[0]
        cached = output.scheduled_cached_reqs
        for index, req_id in enumerate(cached.req_ids):
            if req_id in cached.resumed_req_ids:
                blocks = self.kv_cache_manager.get_block_ids(req_id)[0]
                yield self.requests[req_id], cached.num_computed_tokens[index], blocks

    def _count_reuse(self, request: Any, num_reused: int, block_ids: list[int]) -> None:
        if self.shadows is not None and self.shadows.is_shadow(request):
            return
        reader = _adapter_id(request)
        hit = block_ids[: num_reused // self.block_size]
        others = sum(self._writers.get(block_id, reader) != reader for block_id in hit)
        self.counters.reused_tokens += others * self.block_size

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, Any]:
        outputs: dict[int, Any] = super().update_from_output(*args, **kwargs)
        if self.shadows is not None:
            self.shadows.take_out_of(outputs)
            self.shadows.publish()
        return outputs

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            self.counters.put_into(stats)
        return stats

    def _free_request_blocks(self, request: Any) -> None:
        if self.shadows is None or not self.shadows.keep_blocks_of(request):
            super()._free_request_blocks(request)

    # --- what others see -------------------------------------------------------------------------

    def _watch_publishing(self) -> None:
        """Keep adapted blocks private where only neutral ones are shared, and remember who wrote a block."""
        coordinator = self.kv_cache_manager.coordinator
        cache_blocks: Callable[[Any, int], None] = coordinator.cache_blocks
        record_stats = self.kv_cache_manager.record_prefix_cache_stats
        allocate_slots = self.kv_cache_manager.allocate_slots

        def publish(request: Any, num_computed_tokens: int) -> None:
            if self.sharing.neutral and request.lora_request is not None:
                return
            blocks = coordinator.get_blocks(request.request_id)[0]
            full = blocks[: num_computed_tokens // self.block_size]
            fresh = list(takewhile(lambda block: block.block_hash is None, reversed(full)))
            cache_blocks(request, num_computed_tokens)
            writer = self.shadows.writer_of(request) if self.shadows else _adapter_id(request)
            self._writers.update((block.block_id, writer) for block in fresh)

        coordinator.cache_blocks = publish
        if self.shadows is None:
            return
        shadows = self.shadows

        def record(request: Any, num_hits: int) -> None:
            if not shadows.is_shadow(request):
                record_stats(request, num_hits)

        def allocate(request: Any, *args: Any, **kwargs: Any) -> Any:
            blocks = allocate_slots(request, *args, **kwargs)
            while blocks is None and shadows.give_way_to(request):
                blocks = allocate_slots(request, *args, **kwargs)
            return blocks

        self.kv_cache_manager.record_prefix_cache_stats = record
        self.kv_cache_manager.allocate_slots = allocate


def _adapter_id(request: Any) -> int:
    """vLLM's id of a request's adapter, 0 without one."""
    return request.lora_request.lora_int_id if request.lora_request is not None else 0
