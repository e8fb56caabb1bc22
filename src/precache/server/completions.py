"""``POST /v1/completions``: prompts as text or token ids, echo, log-probabilities, several choices."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi import APIRouter, Request
from fastapi.responses import Response

from precache.request import TokenLogprob
from precache.server.answers import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Finish,
    new_id,
)
from precache.server.errors import ApiError
from precache.server.logprobs import CompletionLogprobsBuilder, joined
from precache.server.masks import mask_factory
from precache.server.protocol import CompletionRequest
from precache.server.service import Service, UsageCount, cancelled_with_client
from precache.server.streaming import event_stream
from precache.server.turns import ChoiceChunk, PromptLogprobs, TurnPlan


def completions_router(service: Service) -> APIRouter:
    """The route over one service."""
    router = APIRouter()

    @router.post("/v1/completions", response_model=Completion)
    async def completions(request: Request, body: CompletionRequest) -> Response | Completion:
        plan = await completion_plan(service, body)
        answer = _CompletionAnswer(service, body, plan, request)
        if body.stream:
            return await event_stream(answer.chunks())
        return await answer.whole()

    return router


async def completion_plan(service: Service, body: CompletionRequest) -> TurnPlan:
    """Check a request. Raises ApiError and InvalidRequestError before anything is queued."""
    agent = service.agent(body.model)
    generate = not (body.echo and body.max_tokens == 0)
    max_tokens = body.max_tokens if generate else 1
    params = body.sampling(body.logprobs, max_tokens)
    bias = body.bias(service.engine.model.shape.vocab_size)
    if body.logprobs is not None:
        _ = service.token_bytes  # refuses a model without tokenizer
    prompts = [await service.encode(prompt, max_tokens, "prompt") for prompt in body.prompts]
    if not prompts:
        raise ApiError(400, "prompt: got 0 prompts, need at least 1", param="prompt")
    return TurnPlan(
        model=body.model,
        agent=agent,
        prompts=tuple(prompts),
        params=params,
        num_choices=body.n or 1,
        make_mask=mask_factory(bias),
        prompt_logprobs=body.logprobs if body.echo else None,
        generate=generate,
    )


class _CompletionAnswer:
    """Turns the events of one request into its answer, whole or in chunks."""

    def __init__(
        self, service: Service, body: CompletionRequest, plan: TurnPlan, request: Request
    ) -> None:
        self._service = service
        self._body = body
        self._plan = plan
        self._request = request
        self._usage = UsageCount()
        self._id = new_id("cmpl")
        self._builders: dict[int, CompletionLogprobsBuilder] = {}
        self._prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
        self._begun: set[int] = set()

    async def whole(self) -> Completion:
        parts: dict[int, list[CompletionChoice]] = {}
        async for choice in self._choices():
            parts.setdefault(choice.index, []).append(choice)
        choices = [_merged(index, parts[index]) for index in sorted(parts)]
        return self._answer(choices, with_usage=True)

    async def chunks(self) -> AsyncIterator[Completion]:
        async for choice in self._choices():
            if choice.text or choice.logprobs is not None or choice.finish_reason is not None:
                yield self._answer([choice])
        if self._body.include_usage:
            yield self._answer([], with_usage=True)

    def _answer(self, choices: list[CompletionChoice], *, with_usage: bool = False) -> Completion:
        usage = self._usage.answer() if with_usage else None
        return Completion(id=self._id, model=self._plan.model, choices=choices, usage=usage)

    async def _choices(self) -> AsyncIterator[CompletionChoice]:
        ticket = self._service.submit(self._plan)
        async with cancelled_with_client(self._request, ticket):
            async for event in ticket:
                if isinstance(event, PromptLogprobs):
                    self._prompt_logprobs[event.prompt_index] = event.logprobs
                else:
                    for choice in self._pieces(event):
                        yield choice
        if not self._plan.generate:
            self._usage.add_prompts(self._plan.prompts)
            for index in range(len(self._plan.prompts) * self._plan.num_choices):
                choice = self._echo(index, index // self._plan.num_choices)
                choice.finish_reason = "length"
                yield choice

    def _pieces(self, event: ChoiceChunk) -> list[CompletionChoice]:
        pieces = []
        if self._body.echo and event.index not in self._begun:
            pieces.append(self._echo(event.index, event.prompt_index))
        self._begun.add(event.index)
        chunk = event.chunk
        finish: Finish | None = None
        if chunk.output is not None:
            self._usage.add(event.prompt_index, chunk.output)
            finish = _finish(chunk.output.finish_reason)
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = self._builder(event.index).tokens(chunk.logprobs)
        pieces.append(_choice(event.index, chunk.text, logprobs, finish))
        return pieces

    def _echo(self, index: int, prompt_index: int) -> CompletionChoice:
        prompt_ids = self._plan.prompts[prompt_index]
        prompt = self._body.prompts[prompt_index]
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = self._builder(index).prompt(prompt_ids, self._prompt_logprobs[prompt_index])
        return _choice(index, self._text(prompt, prompt_ids), logprobs, None)

    def _text(self, prompt: str | list[int], prompt_ids: tuple[int, ...]) -> str:
        if isinstance(prompt, str):
            return prompt
        tokenizer = self._service.engine.tokenizer
        return "" if tokenizer is None else tokenizer.decode(prompt_ids)

    def _builder(self, index: int) -> CompletionLogprobsBuilder:
        if index not in self._builders:
            self._builders[index] = CompletionLogprobsBuilder(self._service.token_bytes)
        return self._builders[index]


def _choice(
    index: int, text: str, logprobs: CompletionLogprobs | None, finish: Finish | None
) -> CompletionChoice:
    return CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=finish)


def _merged(index: int, parts: list[CompletionChoice]) -> CompletionChoice:
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    return _choice(
        index,
        "".join(part.text for part in parts),
        joined(logprobs) if logprobs else None,
        parts[-1].finish_reason,
    )


def _finish(reason: str) -> Finish:
    return "length" if reason == "length" else "stop"
