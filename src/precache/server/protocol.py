"""What the requests look like. Types are strict, every field is known, and every size has a bound.

A field falls into one of four kinds: it is supported (declared below), it is harmless and ignored (``IGNORED``), it is
not supported but the value given changes nothing (``NO_OPS``), or the request is refused with the field's name.
The ranges of sampling parameters are those of SamplingParams.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from precache.errors import SamplingParamsError
from precache.request import MAX_LOGPROBS, SamplingParams

MAX_CHOICES = 16
MAX_PROMPTS = 64
MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_BIASED_TOKENS = 1024

# Say who asks, or how the answer is stored or billed; the answer itself stays the same.
IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)

# Fields of OpenAI's API that are not supported, and the values with which they change nothing.
NO_OPS: dict[str, tuple[object, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "function_call": (None, "none"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "reasoning_effort": (None, "none"),
    "suffix": (None, ""),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair is no text") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]
Name = Annotated[Text, Field(min_length=1, max_length=256)]


class Strict(BaseModel):
    """No conversion of types, no unknown field, no NaN."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class GenerationRequest(Strict):
    """What both endpoints take."""

    model: Name
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Text | list[Text] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MAX_BIASED_TOKENS),
        ]
        | None
    ) = None

    @model_validator(mode="before")
    @classmethod
    def drop_harmless(cls, data: Any) -> Any:
        """Take out what is ignored, and what is not supported but changes nothing."""
        if not isinstance(data, dict):
            return data
        for name in NO_OPS.keys() & data.keys():
            if data[name] not in NO_OPS[name]:
                raise ValueError(f"{name} is not supported (allowed: {list(NO_OPS[name])})")
        return {key: value for key, value in data.items() if key not in (*IGNORED, *NO_OPS)}

    @model_validator(mode="after")
    def check_stream_options(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is allowed with stream=true only")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, logprobs: int | None, max_tokens: int | None) -> SamplingParams:
        """Checked parameters; ``temperature`` is 1 if none is given, as in OpenAI's API.

        Raises SamplingParamsError.
        """
        given = {name: getattr(self, name) for name in _SAMPLING}
        stop = self.stop if self.stop is not None else []
        return SamplingParams(
            **{"temperature": 1.0}
            | {name: value for name, value in given.items() if value is not None},
            max_tokens=max_tokens,
            logprobs=logprobs,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
        )

    def bias(self, vocab_size: int) -> dict[int, float]:
        """``logit_bias`` by token id. Raises SamplingParamsError for an id outside the vocabulary."""
        bias: dict[int, float] = {}
        for key, value in (self.logit_bias or {}).items():
            token_id = int(key) if key.isascii() and key.isdecimal() and len(key) < 12 else -1
            if not 0 <= token_id < vocab_size:
                raise SamplingParamsError("logit_bias", key, f"token ids 0 to {vocab_size - 1}")
            bias[token_id] = value
        return bias


_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "ignore_eos",
)

TokenIds = Annotated[list[int], Field(max_length=1_000_000)]


class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``; the prompt is text or token ids, one or several."""

    prompt: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS)]
    )
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, always as a list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)


class TextPart(Strict):
    type: Literal["text"]
    text: Text


class FunctionCall(Strict):
    name: Name
    arguments: Text


class ToolCall(Strict):
    id: Name
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class ChatMessage(Strict):
    """One message. What the openai client puts into an assistant's message and is empty is accepted."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(max_length=1024)] | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Name | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @property
    def text(self) -> str:
        """The content as one string."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class FunctionDefinition(Strict):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Strict):
    name: Name


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Strict):
    name: Name
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def check_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with type='json_schema', and only with it")
        return self


class ChatRequest(GenerationRequest):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def check_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is allowed with logprobs=true only")
        return self

    @model_validator(mode="after")
    def check_tools(self) -> ChatRequest:
        choice = self.tool_choice
        names = [tool.function.name for tool in self.tools or []]
        if choice not in (None, "none") and not names:
            raise ValueError("tool_choice needs tools")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise ValueError(f"tool_choice: got {choice.function.name!r}, tools are {names}")
        if names and self.response_format is not None and self.response_format.type != "text":
            raise ValueError("response_format and tools cannot be combined")
        return self

    @property
    def output_limit(self) -> int | None:
        """``max_completion_tokens``, or the older name for it."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class LoadAdapterRequest(Strict):
    """``POST /v1/load_lora_adapter``, as in vLLM."""

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False


class UnloadAdapterRequest(Strict):
    """``POST /v1/unload_lora_adapter``, as in vLLM."""

    lora_name: Name
    lora_int_id: None = None
