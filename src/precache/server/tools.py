"""Function calling in the Hermes format, kept in shape by a grammar.

The tools are described at the end of the last message, because text in front of the history would keep agents from
sharing it. A call is ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``; with ``tool_choice`` auto the model
may say text instead, or before.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from precache.chat import StopMatcher
from precache.server.grammar import lark_json
from precache.server.protocol import (
    ChatMessage,
    ChatRequest,
    FunctionCall,
    FunctionDefinition,
    NamedTool,
    ToolCall,
)

BEGIN, END = "<tool_call>", "</tool_call>"
_ANY_OBJECT = {"type": "object"}
_INSTRUCTIONS = """

You may call these functions:
{tools}
To call one, write <tool_call>{{"name": "...", "arguments": {{...}}}}</tool_call>."""


def allowed_functions(body: ChatRequest) -> list[FunctionDefinition]:
    """The functions that the answer may call; none if there are no tools or ``tool_choice`` is none."""
    functions = [tool.function for tool in body.tools or []]
    if body.tool_choice == "none":
        return []
    if isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        return [function for function in functions if function.name == name]
    return functions


def tool_grammar(body: ChatRequest, functions: Sequence[FunctionDefinition]) -> str:
    """The Lark grammar of an answer that may, or must, call functions."""
    forced = body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool)
    single = body.parallel_tool_calls is False or isinstance(body.tool_choice, NamedTool)
    lines = [_forced_start(single) if forced else _free_start(single)]
    lines.append(f'call: "{BEGIN}" body "{END}"')
    lines.append("body: " + " | ".join(lark_json(_call_schema(item)) for item in functions))
    return "\n".join(lines)


def _forced_start(single: bool) -> str:
    return "start: call" if single else "start: call+"


def _free_start(single: bool) -> str:
    more = "" if single else " call*"
    return f'start: TEXT | lead body "{END}"{more}\nlead[lazy]: /(.|\\n)*{BEGIN}/\nTEXT: /(.|\\n)*/'


def _call_schema(function: FunctionDefinition) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": function.name},
            "arguments": function.parameters or _ANY_OBJECT,
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def template_messages(
    messages: Sequence[ChatMessage], functions: Sequence[FunctionDefinition]
) -> list[dict[str, Any]]:
    """Messages as every chat template takes them: calls and their results become text."""
    plain: list[dict[str, Any]] = []
    for message in messages:
        role, text = _plain(message)
        if message.role == "tool" and plain and plain[-1].get("results"):
            plain[-1]["content"] += "\n" + text
            continue
        plain.append({"role": role, "content": text, "results": message.role == "tool"})
        if message.name is not None:
            plain[-1]["name"] = message.name
    if functions:
        listed = "\n".join(
            json.dumps(function.model_dump(exclude_none=True)) for function in functions
        )
        plain[-1]["content"] += _INSTRUCTIONS.format(tools=listed)
    return [{k: v for k, v in message.items() if k != "results"} for message in plain]


def _plain(message: ChatMessage) -> tuple[str, str]:
    if message.role == "tool":
        return "user", f"<tool_response>\n{message.text}\n</tool_response>"
    role = "system" if message.role == "developer" else message.role
    calls = [_call_text(call.function) for call in message.tool_calls or []]
    return role, "\n".join([*([message.text] if message.text or not calls else []), *calls])


def _call_text(function: FunctionCall) -> str:
    return f'{BEGIN}{{"name": {json.dumps(function.name)}, "arguments": {function.arguments}}}{END}'


class ToolCallReader:
    """Splits the text of one answer into what is said and what is called, as the text grows."""

    def __init__(self) -> None:
        self._before = StopMatcher([BEGIN])
        self._text = ""
        self._calling = False

    def push(self, text: str) -> str:
        """Add text; return what of it is said for sure."""
        self._text += text
        if self._calling:
            return ""
        said, self._calling = self._before.push(text)
        return said

    def finish(self) -> tuple[str, list[ToolCall]]:
        """What is left to be said, and the calls. A call that is cut off is none."""
        rest = "" if self._calling else self._before.flush()
        return rest, [_tool_call(index, call) for index, call in enumerate(_calls(self._text))]


def _calls(text: str) -> Iterator[dict[str, Any]]:
    """The complete calls of a text. Their ends are JSON's: an argument may hold the marks themselves."""
    decoder, start = json.JSONDecoder(), text.find(BEGIN)
    while start >= 0:
        body = text[start + len(BEGIN) :].lstrip()
        try:
            call, end = decoder.raw_decode(body)
        except json.JSONDecodeError:
            return  # cut off by the limit
        text = body[end:].lstrip()
        if not text.startswith(END):
            return
        yield call
        start = text.find(BEGIN)


def _tool_call(index: int, call: dict[str, Any]) -> ToolCall:
    arguments = json.dumps(call["arguments"], ensure_ascii=False)
    return ToolCall(
        id=f"call_{uuid.uuid4().hex[:24]}",
        function=FunctionCall(name=call["name"], arguments=arguments),
        index=index,
    )
