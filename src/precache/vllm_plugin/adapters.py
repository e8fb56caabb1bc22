"""Which adapters hold a slot on the workers, and the cache generation that follows from it. Lives in the engine core.

A strip is right only for the adapters that were resident when it was written, and a block only for the weights that
wrote it. So block hashes carry the generation: whenever the resident set changes in a way that makes older blocks
wrong, it moves on, and no later request can match them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from precache.adapters.spec import CONFIG_NAME
from precache.adapters.tensors import parse_name
from precache.adapters.weights import read_folder
from precache.errors import PolicyNotAllowedError, PrecacheError
from precache.vllm_plugin.settings import PluginPolicy


class NoFreeSlotError(PrecacheError):
    """Every adapter slot is taken by an adapter that running requests use."""

    def __init__(self, name: str, slots: int) -> None:
        super().__init__(
            f"adapter {name!r}: all {slots} slots (--max-loras) hold adapters of unfinished requests; "
            "wait for them, or start with more slots"
        )


@dataclass
class Resident:
    """An adapter in a slot."""

    request: Any  # vLLM's LoRARequest that it was loaded with
    version: int  # the generation at which its weights came


class ResidentAdapters:
    """The adapters in the workers' slots, in the order of their last use."""

    def __init__(
        self,
        policy: PluginPolicy,
        num_slots: int,
        in_use: Callable[[], Collection[int]],
        on_change: Callable[[], None],
    ) -> None:
        """`in_use` gives the ids that unfinished requests need; `on_change` is told about a new generation."""
        self.policy = policy
        self.num_slots = num_slots
        self.generation = 0
        self.executor: Any = None  # vLLM's, as soon as the engine core has one
        self._in_use = in_use
        self._on_change = on_change
        self._residents: dict[int, Resident] = {}

    def cache_key(self, lora_request: Any) -> str:
        """What sets a request's blocks apart from others with the same tokens. Its adapter must be resident."""
        if self.policy.shared:
            return f"shared-{self.generation}"
        if lora_request is None:
            return "base"
        return f"adapter-{self._residents[lora_request.lora_int_id].version}"

    def holds(self, lora_request: Any) -> bool:
        """Whether a request can run: it has no adapter, or its adapter is resident with the weights it asks for."""
        if lora_request is None:
            return True
        resident = self._residents.get(lora_request.lora_int_id)
        return resident is not None and resident.request.lora_path == lora_request.lora_path

    def load(self, executor: Any, lora_request: Any) -> bool:
        """Load an adapter on all workers, as EngineCore.add_lora; raises NoFreeSlotError, or what the workers raise.

        A resident adapter is loaded again when the request says `load_inplace` or names another path.
        """
        self.executor = executor
        lora_id = lora_request.lora_int_id
        known = lora_id in self._residents
        if known and self.holds(lora_request) and not lora_request.load_inplace:
            self._touch(lora_id)
            return True
        self._check(lora_request)
        if not known and len(self._residents) >= self.num_slots:
            self._evict_idle(lora_request.lora_name)
        lora_request.load_inplace = known
        try:
            loaded: bool = executor.add_lora(lora_request)
        except Exception:
            # The workers may have gone half of the way; an adapter that is not whole must not stay.
            self.remove(executor, lora_id)
            raise
        lora_request.load_inplace = False
        self._residents.pop(lora_id, None)
        self.generation += 1
        self._residents[lora_id] = Resident(lora_request, self.generation)
        self._on_change()
        return loaded

    def remove(self, executor: Any, lora_id: int) -> bool:
        """Free an adapter's slot, as EngineCore.remove_lora."""
        removed: bool = executor.remove_lora(lora_id)
        if self._residents.pop(lora_id, None) is not None:
            self.generation += 1
            self._on_change()
        return removed

    def admit(self, lora_request: Any) -> bool:
        """Make a request's adapter resident if a slot can be had; False when all are in use."""
        if self.holds(lora_request):
            if lora_request is not None:
                self._touch(lora_request.lora_int_id)
            return True
        try:
            self.load(self.executor, lora_request)
        except NoFreeSlotError:
            return False
        return True

    def _touch(self, lora_id: int) -> None:
        self._residents[lora_id] = self._residents.pop(lora_id)

    def _evict_idle(self, wanted: str) -> None:
        in_use = self._in_use()
        idle = next((lora_id for lora_id in self._residents if lora_id not in in_use), None)
        if idle is None:
            raise NoFreeSlotError(wanted, self.num_slots)
        self.remove(self.executor, idle)

    def _check(self, lora_request: Any) -> None:
        """Refuse what the policy cannot run, before any worker is asked."""
        if not self.policy.strips:
            return
        from vllm.lora.utils import get_adapter_absolute_path

        folder, _, tensors = read_folder(get_adapter_absolute_path(lora_request.lora_path))
        keys = sorted(
            name for name in tensors if (key := parse_name(name)) and key.target == "k_proj"
        )
        if keys:
            raise PolicyNotAllowedError(
                self.policy.name,
                f"{folder / CONFIG_NAME}: adapter {lora_request.lora_name!r} has LoRA on k_proj "
                f"({keys[0]}), and this plugin shares keys as they are",
            )
