"""What all routes share: the engine behind its queue, the names it serves, and the life of one request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cached_property

from fastapi import Request

from precache.adapters.bank import BASE_NAME
from precache.chat import Prompt
from precache.engine.engine import Engine
from precache.errors import ConfigError, ContextLengthError, InvalidRequestError
from precache.request import GenerationOutput
from precache.server.answers import PromptTokensDetails, UsageAnswer
from precache.server.errors import ApiError, ModelNotFoundError, api_error
from precache.server.metrics import Metrics, StateCollector
from precache.server.monitor import Monitor
from precache.server.queue import Ticket, TurnQueue
from precache.server.settings import ServerSettings
from precache.server.token_bytes import TokenBytes
from precache.server.turns import Event, TurnPlan, TurnWork


class Service:
    """One engine with everything that serves it. Raises ConfigError if the base model's name is an adapter's."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        if settings.base_name in engine.agents()[1:]:
            raise ConfigError("served model name", settings.base_name, "a name no adapter has")
        self.engine = engine
        self.settings = settings
        self.metrics = Metrics()
        self.monitor = Monitor(engine, self.metrics)
        self.queue = TurnQueue(settings.max_queue, engine.no_idle_work)
        self.metrics.registry.register(
            StateCollector(
                engine,
                lambda: self.monitor.latest,
                lambda: (int(self.queue.running is not None), self.queue.waiting),
            )
        )

    # -- names ---------------------------------------------------------------------------------------------------

    @property
    def models(self) -> tuple[str, ...]:
        """The names that requests may ask for: the base model's and every adapter's."""
        return (self.settings.base_name, *self.engine.agents()[1:])

    def agent(self, model: str) -> str:
        """The engine's name of a model. Raises ModelNotFoundError; nothing is guessed."""
        if model == self.settings.base_name:
            return BASE_NAME
        if model == BASE_NAME or model not in self.engine.agents():
            raise ModelNotFoundError(model, self.models)
        return model

    # -- prompts -------------------------------------------------------------------------------------------------

    async def encode(self, prompt: Prompt, max_tokens: int | None, param: str) -> tuple[int, ...]:
        """Token ids of a prompt that has room for its output. Raises ApiError naming ``param``."""
        try:
            ids = await asyncio.to_thread(self.engine.encode, prompt)
            room = self.engine.context_window - len(ids)
            if room < 1 or (max_tokens is not None and max_tokens > room):
                raise ContextLengthError(len(ids), max_tokens, self.engine.context_window)
        except InvalidRequestError as error:
            answer = api_error(error)
            raise ApiError(answer.status, answer.message, code=answer.code, param=param) from error
        return tuple(ids)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """The bytes of single tokens. Raises ApiError if the model has no tokenizer."""
        if self.engine.tokenizer is None:
            raise ApiError(400, "logprobs: the model has no tokenizer", param="logprobs")
        return TokenBytes(self.engine.tokenizer)

    # -- turns ---------------------------------------------------------------------------------------------------

    def submit(self, plan: TurnPlan) -> Ticket[Event]:
        """Queue a plan. Raises OverloadedError."""
        work = TurnWork(self.engine, plan, self.monitor)
        return self.queue.submit(work, self.settings.request_timeout_s)

    def begin_shutdown(self) -> None:
        """Take nothing more, end what waits, and give what runs its grace. For the event loop's thread."""
        self.queue.close()
        loop = asyncio.get_running_loop()
        loop.call_later(self.settings.shutdown_grace_s, self.queue.abort)

    def close(self) -> None:
        """End everything, the engine too."""
        self.queue.close()
        self.queue.abort()
        self.queue.join()
        self.engine.close()


class ClientGoneError(ApiError):
    """The client closed its connection; nobody reads the answer, and nothing is wrong with the server."""

    def __init__(self) -> None:
        super().__init__(499, "the client closed its connection", code="client_gone")


@asynccontextmanager
async def cancelled_with_client(request: Request, ticket: Ticket[Event]) -> AsyncIterator[None]:
    """End the work when the client goes away, and in any case when the block is left."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        ticket.cancel(ClientGoneError())

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        ticket.cancel(ClientGoneError())


class UsageCount:
    """Adds up the tokens of the choices of one request; a prompt counts once, as its first choice found it."""

    def __init__(self) -> None:
        self._prompts: dict[int, GenerationOutput] = {}
        self._completion_tokens = 0
        self._ungenerated = 0

    def add(self, prompt_index: int, output: GenerationOutput) -> None:
        self._prompts.setdefault(prompt_index, output)
        self._completion_tokens += output.usage.completion_tokens

    def add_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        """Prompts that nothing was generated for."""
        self._ungenerated += sum(map(len, prompts))

    def answer(self) -> UsageAnswer:
        usages = [output.usage for output in self._prompts.values()]
        prompt_tokens = self._ungenerated + sum(usage.prompt_tokens for usage in usages)
        return UsageAnswer(
            prompt_tokens=prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=prompt_tokens + self._completion_tokens,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=sum(usage.cached_tokens for usage in usages),
                shared_tokens=sum(usage.shared_tokens for usage in usages),
            ),
        )
