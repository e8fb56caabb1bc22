"""``POST /v1/chat/completions``: messages, tools, response formats, log-probabilities, several choices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from fastapi import APIRouter, Request
from fastapi.responses import Response

from precache.engine.sampler import LogitsMask
from precache.request import GenerationOutput, TokenLogprob
from precache.server.answers import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    Finish,
    new_id,
)
from precache.server.grammar import Grammars
from precache.server.logprobs import chat_logprobs
from precache.server.masks import mask_factory
from precache.server.protocol import ChatRequest, FunctionDefinition, ToolCall
from precache.server.service import Service, UsageCount, cancelled_with_client
from precache.server.streaming import event_stream
from precache.server.tools import (
    ToolCallReader,
    allowed_functions,
    template_messages,
    tool_grammar,
)
from precache.server.turns import ChoiceChunk, TurnPlan


def chat_router(service: Service) -> APIRouter:
    """The route over one service."""
    router = APIRouter()
    tokenizer = service.engine.tokenizer
    grammars = None if tokenizer is None else Grammars(tokenizer)

    @router.post("/v1/chat/completions", response_model=ChatCompletion)
    async def chat_completions(request: Request, body: ChatRequest) -> Response | ChatCompletion:
        plan = await chat_plan(service, grammars, body)
        answer = _ChatAnswer(service, body, plan, request)
        if body.stream:
            return await event_stream(answer.chunks())
        return await answer.whole()

    return router


async def chat_plan(service: Service, grammars: Grammars | None, body: ChatRequest) -> TurnPlan:
    """Check a request. Raises ApiError and InvalidRequestError before anything is queued."""
    agent = service.agent(body.model)
    params = body.sampling(body.num_logprobs, body.output_limit)
    bias = body.bias(service.engine.model.shape.vocab_size)
    functions = allowed_functions(body)
    messages = template_messages(body.messages, functions)
    prompt = await service.encode(messages, body.output_limit, "messages")
    assert grammars is not None, "messages were encoded, so there is a tokenizer"
    grammar = await asyncio.to_thread(_grammar, grammars, body, functions)
    return TurnPlan(
        model=body.model,
        agent=agent,
        prompts=(prompt,),
        params=params,
        num_choices=body.n or 1,
        make_mask=mask_factory(bias, grammar),
    )


def _grammar(
    grammars: Grammars, body: ChatRequest, functions: list[FunctionDefinition]
) -> Callable[[], LogitsMask] | None:
    if functions:
        return grammars.lark(tool_grammar(body, functions), "tools")
    form = body.response_format
    if form is None or form.type == "text":
        return None
    schema = {"type": "object"} if form.json_schema is None else form.json_schema.schema_
    return grammars.json_schema(schema, "response_format")


@dataclass
class _Said:
    """What one choice has said so far."""

    reader: ToolCallReader | None
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    finish: Finish | None = None

    def push(self, event: ChoiceChunk) -> str:
        """Take a chunk in; return what it adds to the text for sure."""
        chunk = event.chunk
        self.logprobs += chunk.logprobs
        text = chunk.text if self.reader is None else self.reader.push(chunk.text)
        if chunk.output is not None:
            if self.reader is not None:
                rest, self.calls = self.reader.finish()
                text += rest
            self.finish = _finish(chunk.output, self.calls)
        self.text += text
        return text


class _ChatAnswer:
    """Turns the events of one request into its answer, whole or in chunks."""

    def __init__(
        self, service: Service, body: ChatRequest, plan: TurnPlan, request: Request
    ) -> None:
        self._service = service
        self._body = body
        self._plan = plan
        self._request = request
        self._usage = UsageCount()
        self._id = new_id("chatcmpl")
        self._said: dict[int, _Said] = {}

    async def whole(self) -> ChatCompletion:
        async for _ in self._events():
            pass
        choices = []
        for index, said in sorted(self._said.items()):
            assert said.finish is not None
            message = AssistantMessage(
                content=said.text if said.text or not said.calls else None,
                tool_calls=said.calls or None,
            )
            choices.append(
                ChatChoice(
                    index=index,
                    message=message,
                    logprobs=self._logprobs(said.logprobs),
                    finish_reason=said.finish,
                )
            )
        return ChatCompletion(
            id=self._id, model=self._plan.model, choices=choices, usage=self._usage.answer()
        )

    async def chunks(self) -> AsyncIterator[ChatChunk]:
        begun: set[int] = set()
        async for event, text in self._events():
            if event.index not in begun:
                begun.add(event.index)
                yield self._chunk(event.index, Delta(role="assistant", content=""))
            said = self._said[event.index]
            logprobs = self._logprobs(event.chunk.logprobs)
            if text or logprobs is not None:
                yield self._chunk(event.index, Delta(content=text), logprobs)
            if said.calls:
                yield self._chunk(event.index, Delta(tool_calls=said.calls))
            if said.finish is not None:
                yield self._chunk(event.index, Delta(), finish=said.finish)
        if self._body.include_usage:
            usage = self._usage.answer()
            yield ChatChunk(id=self._id, model=self._plan.model, choices=[], usage=usage)

    async def _events(self) -> AsyncIterator[tuple[ChoiceChunk, str]]:
        ticket = self._service.submit(self._plan)
        async with cancelled_with_client(self._request, ticket):
            async for event in ticket:
                assert isinstance(event, ChoiceChunk)
                if event.index not in self._said:
                    functions = allowed_functions(self._body)
                    self._said[event.index] = _Said(ToolCallReader() if functions else None)
                if event.chunk.output is not None:
                    self._usage.add(event.prompt_index, event.chunk.output)
                yield event, self._said[event.index].push(event)

    def _chunk(
        self,
        index: int,
        delta: Delta,
        logprobs: ChatLogprobs | None = None,
        finish: Finish | None = None,
    ) -> ChatChunk:
        choice = ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish)
        return ChatChunk(id=self._id, model=self._plan.model, choices=[choice])

    def _logprobs(
        self, tokens: list[TokenLogprob] | tuple[TokenLogprob, ...]
    ) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(tokens, self._service.token_bytes)


def _finish(output: GenerationOutput, calls: list[ToolCall]) -> Finish:
    if calls:
        return "tool_calls"
    return "length" if output.finish_reason == "length" else "stop"
