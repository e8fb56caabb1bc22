"""The public engine: text in, text out, adapters that come and go, and a look into the cache.

One engine serves one model. Its methods may be called from several threads; forward passes run one at a time under a
lock that is handed on after every pass of a turn, so two streams take turns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from precache.adapters.bank import BASE_NAME, Adapter, AdapterBank
from precache.adapters.verdicts import model_conditions
from precache.cache.store import Kept, TrajectoryStore
from precache.cache.trajectory import Writer
from precache.chat import ChatTokenizer, Prompt
from precache.config import EngineConfig, parse_size
from precache.engine.checkpoints import resolve_model
from precache.engine.idle import IdleWorker
from precache.engine.lock import FairLock
from precache.engine.model import BackboneModel
from precache.engine.output import OutputStream
from precache.engine.persistence import CacheOwner, load_trajectory, save_trajectory
from precache.engine.policies import SharingPolicy, make_policy
from precache.engine.sampler import LogitsMask
from precache.engine.sessions import CacheStats, SessionInfo, describe, stats
from precache.engine.turns import TurnRunner
from precache.errors import (
    ConfigError,
    ContextLengthError,
    EmptyPromptError,
    EngineClosedError,
    InvalidRequestError,
    PolicyNotAllowedError,
    SamplingParamsError,
    TokenIdError,
    UnknownAdapterError,
)
from precache.request import GenerationChunk, GenerationOutput, SamplingParams


class Engine:
    """LoRA agents over one backbone and one shared cache.

    ``base`` is always a legal agent: the model without an adapter.
    """

    def __init__(
        self, model: BackboneModel, tokenizer: ChatTokenizer | None, config: EngineConfig
    ) -> None:
        self.config = config
        self.model = model
        self.tokenizer = tokenizer
        self.policy: SharingPolicy = make_policy(config.policy, config.schedule, config)
        self.policy.check_model(model.shape, model.digest)
        self.bank = AdapterBank(model.shape, dtype=model.dtype, device=model.device)
        self.store = TrajectoryStore(model.layout, config.cache_memory, config.growth_tokens)
        self.context_window = _context_window(config, model)
        self._runner = TurnRunner(model, self.bank, self.store, self.policy, config.prefill_chunk)
        self._lock = FairLock()
        self._idle = IdleWorker(self._idle_turn) if self.policy.when_idle else None
        self._closed = False

    @classmethod
    def load(
        cls,
        model: str,
        adapters: Mapping[str, str | Path] | None = None,
        *,
        policy: str = EngineConfig.policy,
        schedule: str | None = None,
        cache_memory: str | int = EngineConfig.cache_memory,
        dtype: str = EngineConfig.dtype,
        **settings: Any,
    ) -> Engine:
        """Load a model (hub id, local folder or ``smollm2``) and its adapters (name -> PEFT folder).

        ``settings`` are the other fields of EngineConfig. Raises ConfigError, UnknownPolicyError, ModelError,
        AdapterError and PolicyNotAllowedError, each before anything is served.
        """
        config = EngineConfig(
            policy=policy,
            schedule=schedule,
            cache_memory=parse_size(cache_memory),
            dtype=dtype,
            **settings,
        )
        make_policy(policy, schedule, config)  # a wrong name fails before the model is loaded
        backbone = BackboneModel.load(model, config)
        engine = cls(backbone, _find_tokenizer(resolve_model(model), backbone), config)
        try:
            for name, path in (adapters or {}).items():
                engine.add_adapter(name, path)
        except BaseException:
            engine.close()
            raise
        return engine

    def with_policy(self, policy: str, schedule: str | None = None, **settings: Any) -> Engine:
        """Another engine with the same model and adapters, its own empty cache and another policy.

        Model and adapters are shared, not loaded again. ``settings`` replace other fields of the EngineConfig, those of
        policies and budgets. Raises ConfigError, UnknownPolicyError and PolicyNotAllowedError.
        """
        config = replace(self.config, policy=policy, schedule=schedule, **settings)
        engine = Engine(self.model, self.tokenizer, config)
        try:
            engine.bank.take(self.bank, admit=engine._check_adapters)
        except BaseException:
            engine.close()
            raise
        engine.store.keep_only(engine._kept())
        return engine

    # -- generation ----------------------------------------------------------------------------------------------

    def generate(
        self, agent: str, prompt: Prompt, *, params: SamplingParams | None = None, **sampling: Any
    ) -> GenerationOutput:
        """Run one turn and return it.

        ``prompt`` is text, chat messages or token ids. Give ``params``, or the fields of SamplingParams by name.
        Raises InvalidRequestError (unknown agent, empty or too long prompt, token ids or parameters out of range),
        CacheBudgetError and NonFiniteLogitsError; the cache stays valid and the engine goes on.
        """
        last: GenerationOutput | None = None
        for chunk in self.stream(agent, prompt, params=params, **sampling):
            last = chunk.output
        assert last is not None
        return last

    def stream(
        self,
        agent: str,
        prompt: Prompt,
        *,
        params: SamplingParams | None = None,
        logits_mask: LogitsMask | None = None,
        cancel: threading.Event | None = None,
        **sampling: Any,
    ) -> Iterator[GenerationChunk]:
        """Run one turn and yield its text as it grows; the last chunk holds the whole output.

        The request is checked before this returns; errors are those of ``generate``. ``logits_mask`` restricts what is
        sampled (see Sampler). Closing the iterator aborts the turn, and so does setting ``cancel`` from another thread,
        which raises TurnCancelledError before the next forward pass; what the turn had cached stays.
        """
        params = _sampling_params(params, sampling)
        adapter = self._adapter(agent)
        prompt_ids = self.encode(prompt)
        max_tokens = self._max_tokens(adapter, prompt_ids, params.max_tokens)
        if params.stop and self.tokenizer is None:
            raise SamplingParamsError("stop", params.stop, "none: the model has no tokenizer")
        return self._run(agent, prompt_ids, params, max_tokens, logits_mask, cancel)

    def score(self, agent: str, prompt: Prompt, output_ids: Sequence[int]) -> Tensor:
        """Run a turn that is forced to say ``output_ids`` and return the logits of each, [len(output_ids), vocab] fp32.

        The cache is left as if the agent had generated these tokens. Errors are those of ``generate``.
        """
        adapter = self._adapter(agent)
        prompt_ids = self.encode(prompt)
        output_ids = self._checked_ids(output_ids)
        if not output_ids:
            raise InvalidRequestError("score: got 0 output tokens, need at least 1")
        self._max_tokens(adapter, prompt_ids, len(output_ids))
        with self._foreground():
            adapter = self._adapter(agent)  # it may have been replaced by another thread
            turn = self._runner.begin(adapter, prompt_ids, len(output_ids))
            try:
                tokens = [*prompt_ids[turn.matched :], *output_ids[:-1]]
                logits = self._runner.extend(turn, tokens, len(prompt_ids) - 1)
            except BaseException:
                self._runner.abort(turn)
                raise
            self._runner.finish(turn)
        return logits

    def _run(
        self,
        agent: str,
        prompt_ids: list[int],
        params: SamplingParams,
        max_tokens: int,
        logits_mask: LogitsMask | None,
        cancel: threading.Event | None,
    ) -> Iterator[GenerationChunk]:
        with self.no_idle_work():
            started = time.perf_counter()
            output = OutputStream(
                agent,
                prompt_ids,
                params,
                max_tokens,
                self.tokenizer,
                self._eos_token_ids(),
                logits_mask,
            )
            with self._lock:
                adapter = self._adapter(agent)  # as it is now, not when the iterator was made
                turn = self._runner.begin(adapter, prompt_ids, max_tokens, cancel)
            try:
                tokens = prompt_ids[turn.matched :]
                while output.finish_reason is None:
                    last = turn.trajectory.length + len(tokens) - 1
                    for chunk in self._runner.chunks(tokens):
                        with self._lock:
                            logits = self._runner.extend(turn, chunk, last)
                    tokens = [output.sample(logits[0])]
                    output.ttft_s = output.ttft_s or time.perf_counter() - started
                    if output.finish_reason is None:
                        yield output.chunk()
            except BaseException:
                with self._lock:
                    self._runner.abort(turn)
                raise
            with self._lock:
                self._runner.finish(turn)
        yield output.last_chunk(turn, time.perf_counter() - started)

    # -- checks --------------------------------------------------------------------------------------------------

    def _adapter(self, agent: str) -> Adapter | None:
        if self._closed:
            raise EngineClosedError
        if agent == BASE_NAME:
            return None
        if not isinstance(agent, str) or agent not in self.bank:
            raise UnknownAdapterError(agent, self.agents())
        return self.bank.get(agent)

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt, checked. Raises InvalidRequestError; takes no lock."""
        if isinstance(prompt, bytes | bytearray) or not hasattr(prompt, "__getitem__"):
            raise InvalidRequestError(
                f"prompt: got {type(prompt).__name__}, allowed are text, chat messages and token ids"
            )
        if self.tokenizer is None:
            if isinstance(prompt, str) or any(not isinstance(item, int) for item in prompt):
                raise InvalidRequestError(
                    "prompt: got text, allowed are token ids: the model has no tokenizer"
                )
            token_ids = [item for item in prompt if isinstance(item, int)]
        else:
            token_ids = self.tokenizer.encode_prompt(prompt)
        if not token_ids:
            raise EmptyPromptError
        return self._checked_ids(token_ids)

    def _checked_ids(self, token_ids: Sequence[int]) -> list[int]:
        vocab_size = self.model.shape.vocab_size
        for position, token_id in enumerate(token_ids):
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise TokenIdError(token_id, position, vocab_size)
            if not 0 <= token_id < vocab_size:
                raise TokenIdError(token_id, position, vocab_size)
        return list(token_ids)

    def _max_tokens(
        self, adapter: Adapter | None, prompt_ids: Sequence[int], asked: int | None
    ) -> int:
        """Output tokens that the turn may take. The last one is never cached, so it needs no room."""
        room = self.context_window - len(prompt_ids)
        if room < 1 or (asked is not None and asked > room):
            raise ContextLengthError(len(prompt_ids), asked, self.context_window)
        with self._lock:
            if asked is None:
                room = min(room, self._runner.room(adapter) - len(prompt_ids) + 1)
            self._runner.check_budget(adapter, len(prompt_ids) + (asked or 1) - 1)
        return asked or room

    def _eos_token_ids(self) -> tuple[int, ...]:
        if self.tokenizer is None:
            return self.model.eos_token_ids
        return tuple(self.tokenizer.eos_token_ids)

    # -- adapters ------------------------------------------------------------------------------------------------

    def agents(self) -> tuple[str, ...]:
        """Names that may run a turn: ``base`` and the adapters."""
        return (BASE_NAME, *self.bank.names)

    def add_adapter(self, name: str, path: str | Path) -> None:
        """Load an adapter. Tokens that are cached already are caught up at its first turn.

        Raises AdapterError and PolicyNotAllowedError; nothing is loaded then.
        """
        with self._foreground():
            self.bank.load(name, path, admit=self._check_adapters)
            self.store.keep_only(self._kept())

    def replace_adapter(self, name: str, path: str | Path) -> None:
        """Give an agent new weights. Its strip goes, and so do tokens written with the old weights unless neutral.

        Raises UnknownAdapterError, AdapterError and PolicyNotAllowedError; the old weights stay then.
        """
        with self._foreground():
            self.bank.replace(name, path, admit=self._check_adapters)
            self.store.keep_only(self._kept())

    def remove_adapter(self, name: str) -> None:
        """Unload an adapter and its strip. Raises UnknownAdapterError."""
        with self._foreground():
            self.bank.remove(name)
            self.store.keep_only(self._kept())

    def _check_adapters(self, adapters: Sequence[Adapter]) -> None:
        if self.model.key_norms and (conditions := model_conditions(adapters)):
            raise PolicyNotAllowedError(self.policy.name, conditions[0])
        self.policy.check(adapters)

    def _kept(self) -> Kept:
        digests = {adapter.name: adapter.digest for adapter in self.bank}
        neutral = self.policy.base_is_neutral

        def stale(writer: Writer) -> bool:
            return not neutral and digests.get(writer.name, writer.digest) != writer.digest

        agents = (None, *self.bank)
        return Kept(
            strips=frozenset(write.layout.key for write in self.policy.strips(self.bank)),
            namespaces=frozenset(self.policy.namespace(adapter) for adapter in agents),
            stale=stale,
        )

    # -- the cache -----------------------------------------------------------------------------------------------

    def sessions(self) -> tuple[SessionInfo, ...]:
        """What is cached, by whom it was written, and its bytes."""
        with self._lock:
            readers = self._readers()
            return tuple(describe(item, readers) for item in self.store.trajectories)

    def _readers(self) -> dict[str, tuple[str, ...]]:
        readers: dict[str, tuple[str, ...]] = {}
        for adapter in (None, *self.bank):
            layout = self.policy.strip_of(adapter, self.bank)
            if layout is not None:
                name = BASE_NAME if adapter is None else adapter.name
                readers[layout.key] = (*readers.get(layout.key, ()), name)
        return readers

    def stats(self) -> CacheStats:
        """Hits, misses by reason, evictions and bytes."""
        with self._lock:
            runner = self._runner
            return stats(self.store, runner.neutral_tokens, runner.work, runner.catch_up)

    def reset(self) -> None:
        """Drop everything cached, but for what running turns use."""
        with self._foreground():
            self.store.clear()

    def save_session(self, session_id: str, path: str | Path) -> None:
        """Write one session's cache to a safetensors file. Raises UnknownSessionError, CacheFileError."""
        with self._foreground():
            trajectory = self.store.get(session_id)
            if not trajectory.busy:
                self._runner.run_deferred(trajectory)
            save_trajectory(trajectory, path, self._owner())

    def load_session(self, path: str | Path) -> str:
        """Read a saved session and return its id here.

        Raises CacheFileError if the file is corrupt or was made with another model, policy or adapters, and
        CacheBudgetError; nothing is cached then.
        """
        with self._foreground():
            return load_trajectory(self.store, path, self._owner()).session_id

    def _owner(self) -> CacheOwner:
        return CacheOwner(
            model_digest=self.model.digest(),
            vocab_size=self.model.shape.vocab_size,
            policy=self.policy.signature(self.model.shape),
            strips={write.layout.key: write.layout for write in self.policy.strips(self.bank)},
            adapters={adapter.name: adapter.digest for adapter in self.bank},
            namespaces=self._kept().namespaces,
            defers=self.policy.deferred(self.bank) is not None,
        )

    # -- idle time and the end -----------------------------------------------------------------------------------

    def idle_step(self) -> bool:
        """Run one chunk of deferred work, if there is any. True if it did."""
        with self._lock:
            for trajectory in self.store.trajectories:
                if trajectory.pending_from is not None and not trajectory.busy:
                    self._runner.run_deferred(trajectory, max_chunks=1)
                    return True
            return False

    def _idle_turn(self) -> bool:
        """A step of the idle worker, which may have waited for the lock while a request came."""
        with self._lock:
            return self._idle is not None and (self._idle.held or self.idle_step())

    @contextmanager
    def no_idle_work(self) -> Iterator[None]:
        """Keep the idle worker from starting anything new: requests are here, or about to come."""
        if self._idle is not None:
            self._idle.hold()
        try:
            yield
        finally:
            if self._idle is not None:
                self._idle.unhold()

    @contextmanager
    def _foreground(self) -> Iterator[None]:
        """The engine's lock, taken with precedence over the idle worker."""
        with self.no_idle_work(), self._lock:
            if self._closed:
                raise EngineClosedError
            yield

    def close(self) -> None:
        """Stop the idle worker and drop the cache. Later requests raise EngineClosedError."""
        if self._idle is not None:
            self._idle.stop()
        with self._lock:
            self._closed = True
            self.store.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _context_window(config: EngineConfig, model: BackboneModel) -> int:
    asked, limit = config.context_window, model.context_window
    if asked is not None and asked > limit:
        raise ConfigError("context_window", asked, f"at most {limit}, the model's own")
    return asked or limit


def _find_tokenizer(path: str, model: BackboneModel) -> ChatTokenizer | None:
    """The model's tokenizer; None for a local folder that has none, which then takes token ids only."""
    folder = Path(path)
    files = ("tokenizer.json", "tokenizer_config.json")
    if folder.is_dir() and not any((folder / name).is_file() for name in files):
        return None
    return ChatTokenizer.from_pretrained(
        path, vocab_size=model.shape.vocab_size, eos_token_ids=model.eos_token_ids
    )


def _sampling_params(params: SamplingParams | None, sampling: dict[str, Any]) -> SamplingParams:
    if params is not None:
        if sampling:
            raise InvalidRequestError(f"give params or {sorted(sampling)}, not both")
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"params: got {type(params).__name__}, allowed is a SamplingParams"
            )
        return params
    unknown = set(sampling) - set(SamplingParams.__dataclass_fields__)
    if unknown:
        raise InvalidRequestError(
            f"unknown sampling parameters: got {sorted(unknown)}, "
            f"allowed are {sorted(SamplingParams.__dataclass_fields__)}"
        )
    for name in ("stop", "stop_token_ids"):
        if isinstance(sampling.get(name), str):
            sampling[name] = (sampling[name],)
        elif isinstance(sampling.get(name, ()), list | tuple | None):
            sampling[name] = tuple(sampling.get(name) or ())
    return SamplingParams(**sampling)
