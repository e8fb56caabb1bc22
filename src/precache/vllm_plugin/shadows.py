"""Double batching in a paged engine: neutral passes over what adapted turns wrote, block by block.

An adapted turn keeps its blocks to itself. Whenever it has filled blocks that nobody has published, a shadow, which is
an ordinary request without an adapter over the same tokens, is put before the waiting requests: it matches what is
shared already, runs the rest with adapters off, and is published by vLLM like any request. The writer's own strip is
then copied from the turn's blocks (strips.StripMoves), in the same step in which the shadow writes the others.

Publishing is best effort. Under memory pressure the blocks of finished turns are given back first, and their tokens are
run again by whoever needs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from precache.vllm_plugin.counters import Counters


class Moves(NamedTuple):
    """Cache slots whose strip of one adapter is copied: what `strips.StripMoves` becomes in a worker."""

    lora_id: int
    src: list[int]
    dst: list[int]


@dataclass(eq=False)
class Turn:
    """An adapted request, from its admission until all it wrote is published or given up."""

    request: Any
    shared: int  # tokens of the shared prefix that it was admitted with
    covered: int  # tokens that are published, or that its shadow is about to publish
    shadow: Any = None
    held: Any = None  # the blocks of a finished turn; None while the request owns them
    given_up: bool = False  # nothing of it is published any more


class ShadowPublisher:
    """The turns and shadows of one scheduler."""

    def __init__(self, scheduler: Any, counters: Counters) -> None:
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._counters = counters
        self._turns: dict[str, Turn] = {}  # by request id
        self._turn_of: dict[str, Turn] = {}  # by shadow id, until the shadow has ended
        self._dropped: set[str] = set()  # ids of shadows that must not run
        self._number = 0

    def is_shadow(self, request: Any) -> bool:
        return request.request_id in self._turn_of

    def is_dropped(self, request: Any) -> bool:
        """Whether a waiting request is a shadow that must not run."""
        return request.request_id in self._dropped

    def writer_of(self, request: Any) -> int:
        """The id of the adapter whose turn a request without an adapter publishes; 0 if it is no shadow."""
        turn = self._turn_of.get(request.request_id)
        return 0 if turn is None else turn.request.lora_request.lora_int_id

    # --- before and during scheduling ------------------------------------------------------------

    def abort_dropped(self) -> None:
        """End the shadows that must not run. Not while requests are being scheduled."""
        from vllm.v1.request import RequestStatus

        dropped, self._dropped = self._dropped, set()
        self._scheduler.finish_requests(dropped, RequestStatus.FINISHED_ABORTED)
        self._collect_ended()

    def give_way_to(self, request: Any) -> bool:
        """There is no memory for a request: free what was kept for shadows. False when nothing was freed.

        A shadow never makes room for itself; it is dropped.
        """
        if self.is_shadow(request):
            self._drop(self._turn_of[request.request_id])
            return False
        idle = [t for t in self._turns.values() if t.held is not None and not _is_running(t.shadow)]
        for turn in idle:
            self._give_up(turn)
        return bool(idle)

    def on_preempted(self, request: Any) -> None:
        """A running request loses its blocks."""
        if self.is_shadow(request):
            self._drop(self._turn_of[request.request_id])
        elif (turn := self._turns.pop(request.request_id, None)) is not None:
            self._give_up(turn)

    def on_admitted(self, request: Any, num_reused: int) -> None:
        """A request starts, or starts again, with this many tokens of a shared prefix."""
        if request.lora_request is not None:
            self._turns[request.request_id] = Turn(request, num_reused, num_reused)

    def moves_of(self, num_scheduled_tokens: dict[str, int]) -> list[Moves]:
        """What has to be copied in a step, which vLLM has just scheduled."""
        moves = []
        for shadow_id, turn in self._turn_of.items():
            count = num_scheduled_tokens.get(shadow_id)
            if count is None:
                continue
            self._counters.shadow_tokens += count
            end = turn.shadow.num_computed_tokens
            own = range(max(end - count, turn.shared), end)
            blocks = self._manager.get_block_ids(shadow_id)[0]
            if turn.given_up:
                # The turn was preempted in this very step, or the adapters changed: nobody may match these blocks.
                self._manager.evict_blocks(set(blocks[own.start // self._block_size :]))
            elif own:
                lora_id = turn.request.lora_request.lora_int_id
                src = self._slots(self._blocks_of(turn), own)
                moves.append(Moves(lora_id, src, self._slots(blocks, own)))
        return moves

    # --- after a step ----------------------------------------------------------------------------

    def take_out_of(self, outputs: dict[int, Any]) -> None:
        """Remove what vLLM reports about shadows from its outputs, which go to the front ends."""
        for output in outputs.values():
            output.outputs = [o for o in output.outputs if o.request_id not in self._turn_of]
            if output.finished_requests:
                output.finished_requests = output.finished_requests - self._turn_of.keys()

    def publish(self) -> None:
        """Start shadows for turns that have filled blocks, and let go of turns that are done."""
        self._collect_ended()
        for turn in list(self._turns.values()):
            if turn.shadow is None and not turn.given_up:
                self._start_shadow(turn)
            if turn.shadow is None and turn.request.is_finished():
                self._give_up(turn)

    def keep_blocks_of(self, request: Any) -> bool:
        """A request ends: whether its blocks are kept until its last shadow has run."""
        turn = self._turns.get(request.request_id)
        if turn is None or not request.is_finished():
            return False
        turn.held = self._manager.pop_blocks_for_free(request)
        if _was_cut_off(request) and not _is_running(turn.shadow):
            self._give_up(turn)
        return True

    def drop_all(self) -> None:
        """The adapters have changed: nothing that is running may be published from here on."""
        for turn in list(self._turns.values()):
            turn.given_up = True
            if not _is_running(turn.shadow):
                self._give_up(turn)

    # --- parts -----------------------------------------------------------------------------------

    @property
    def _block_size(self) -> int:
        size: int = self._scheduler.block_size
        return size

    def _start_shadow(self, turn: Turn) -> None:
        request = turn.request
        if request.num_computed_tokens < request.num_prompt_tokens:
            return  # its first token comes first
        # The last token was sampled and never run.
        written = min(request.num_computed_tokens, request.num_tokens - 1)
        end = written // self._block_size * self._block_size
        num_blocks = (end - turn.shared) // self._block_size
        if end <= turn.covered or num_blocks > self._manager.block_pool.get_num_free_blocks():
            return
        shadow = self._make_shadow(request, end)
        turn.covered = end
        if self._manager.block_pool.get_cached_block(shadow.block_hashes[-1], [0]) is not None:
            return  # another turn wrote the same tokens first
        turn.shadow = shadow
        self._turn_of[shadow.request_id] = turn
        self._scheduler.requests[shadow.request_id] = shadow
        self._scheduler.waiting.prepend_request(shadow)

    def _make_shadow(self, request: Any, num_tokens: int) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self._number += 1
        shadow = Request(
            request_id=f"{request.request_id}#shadow{self._number}",
            prompt_token_ids=list(request.all_token_ids[:num_tokens]),
            sampling_params=SamplingParams(max_tokens=1, temperature=0.0),
            pooling_params=None,
            client_index=request.client_index,
            cache_salt=request.cache_salt,
            priority=request.priority,
            block_hasher=request._block_hasher,
        )
        return shadow

    def _collect_ended(self) -> None:
        for shadow_id, turn in list(self._turn_of.items()):
            if not turn.shadow.is_finished():
                continue
            cut_off = _was_cut_off(turn.shadow)
            self._counters.shadows_dropped += cut_off
            turn.shadow = None
            del self._turn_of[shadow_id]
            if cut_off:
                turn.covered = turn.shared
                if turn.held is not None:
                    self._give_up(turn)

    def _drop(self, turn: Turn) -> None:
        if turn.shadow is not None:
            self._dropped.add(turn.shadow.request_id)

    def _give_up(self, turn: Turn) -> None:
        """Publish no more of a turn, and free what it holds."""
        turn.given_up = True
        if not _is_running(turn.shadow):
            self._drop(turn)
        if turn.held is not None:
            blocks, turn.held = turn.held, None
            self._manager.block_pool.free_blocks(reversed(blocks))
        if turn.request.is_finished():
            self._turns.pop(turn.request.request_id, None)

    def _blocks_of(self, turn: Turn) -> list[int]:
        if turn.held is not None:
            return [block.block_id for block in turn.held]
        blocks: list[int] = self._manager.get_block_ids(turn.request.request_id)[0]
        return blocks

    def _slots(self, blocks: list[int], positions: range) -> list[int]:
        size = self._block_size
        return [blocks[position // size] * size + position % size for position in positions]


def _is_running(request: Any) -> bool:
    from vllm.v1.request import RequestStatus

    return request is not None and request.status == RequestStatus.RUNNING


def _was_cut_off(request: Any) -> bool:
    """Whether a finished request ended before it was through: aborted, or failed."""
    from vllm.v1.request import RequestStatus

    cut: bool = request.status in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)
    return cut
