"""Sampling, log-probabilities, choices, echo, response formats and tools."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import pytest

from precache.server.tools import ToolCallReader
from tests.server.conftest import Serve
from tests.server.live import LiveServer

TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Looks a word up",
        "parameters": {
            "type": "object",
            "properties": {"word": {"enum": ["a", "b"]}},
            "required": ["word"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def roomy(serve: Serve) -> Iterator[LiveServer]:
    """A byte is a token, and tools take hundreds."""
    with serve(context_window=512) as live:
        yield live


def test_a_seed_repeats_and_choices_differ(server: LiveServer) -> None:
    def texts(seed: int) -> list[str]:
        answer = server.complete(temperature=1, seed=seed, n=3, max_tokens=12)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.text for choice in answer.choices]

    assert texts(5) == texts(5) != texts(6)
    assert len(set(texts(5))) == 3


def test_several_prompts_and_choices_are_in_order(server: LiveServer) -> None:
    answer = server.complete(prompt=["abc", "xyz"], n=2, max_tokens=3, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text[:3] for choice in answer.choices] == ["abc", "abc", "xyz", "xyz"]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 12)


def test_logprobs_of_both_endpoints_agree(server: LiveServer) -> None:
    ids = server.engine.encode([{"role": "user", "content": "hello"}])
    chat = server.chat(logprobs=True, top_logprobs=3).choices[0].logprobs.content
    text = server.complete(prompt=ids, logprobs=3).choices[0].logprobs
    assert [token.logprob for token in chat] == pytest.approx(text.token_logprobs, abs=1e-4)
    assert [token.token for token in chat] == text.tokens
    assert all(len(token.top_logprobs) == 3 for token in chat)
    assert all(bytes(token.bytes).decode("utf-8", "replace") == token.token for token in chat)


def test_echo_scores_the_prompt_as_if_it_had_been_said(server: LiveServer) -> None:
    with server.engine.saying("tAfq", eos=False):
        said = server.complete(prompt="abc", max_tokens=4, logprobs=0).choices[0]
    prompt = "abc" + said.text
    scored = server.complete(prompt=prompt, max_tokens=0, echo=True, logprobs=1).choices[0]
    assert scored.text == prompt
    assert scored.logprobs.token_logprobs[0] is None
    assert scored.logprobs.token_logprobs[3:] == pytest.approx(
        said.logprobs.token_logprobs, abs=1e-4
    )
    assert len(scored.logprobs.tokens) == len(scored.logprobs.text_offset) == len(prompt)


def test_a_prompt_that_is_only_echoed_has_every_choice(server: LiveServer) -> None:
    answer = server.complete(prompt=["ab", "xyz"], n=2, max_tokens=0, echo=True, logprobs=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == ["ab", "ab", "xyz", "xyz"]
    assert len(answer.choices[3].logprobs.token_logprobs) == 3
    assert answer.usage.prompt_tokens == 5


def test_a_biased_token_is_said_or_never_said(server: LiveServer) -> None:
    (token,) = server.engine.encode("q")
    bias = {"extra_body": {"logit_bias": {str(token): 100}}, "max_tokens": 4}
    assert server.complete(**bias).choices[0].text == "qqqq"
    bias["extra_body"] = {"logit_bias": {str(token): 100}, "repetition_penalty": 50}
    assert server.complete(**bias).choices[0].text != "qqqq"


def test_sampling_fields_beyond_openai_work(server: LiveServer) -> None:
    greedy = server.complete(max_tokens=8).choices[0].text
    for extra in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}):
        answer = server.complete(temperature=1.5, max_tokens=8, extra_body=extra)
        assert answer.choices[0].text == greedy


def test_json_object_is_json(server: LiveServer) -> None:
    answer = server.chat(
        response_format={"type": "json_object"}, max_tokens=100, n=4, temperature=1
    )
    for choice in answer.choices:
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)


def test_a_json_schema_is_kept(server: LiveServer) -> None:
    schema = {
        "type": "object",
        "properties": {"answer": {"enum": ["A", "B"]}, "sure": {"type": "boolean"}},
        "required": ["answer", "sure"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": schema}}
    choice = server.chat(response_format=form, max_tokens=120, temperature=1, seed=1).choices[0]
    assert choice.finish_reason == "stop"
    verdict = json.loads(choice.message.content)
    assert verdict["answer"] in ("A", "B")
    assert isinstance(verdict["sure"], bool)


@pytest.mark.parametrize("schema", [{"type": "nonsense"}, {"$ref": "http://x/y"}, {"pattern": "("}])
def test_a_schema_that_is_none_is_refused(server: LiveServer, schema: dict[str, object]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    messages = [{"role": "user", "content": "a"}]
    error = server.error(
        "/v1/chat/completions", model="plan", messages=messages, response_format=form
    )
    assert error["param"] == "response_format"


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "search"}}]
)
def test_a_tool_that_must_be_called_is_called(roomy: LiveServer, choice: object) -> None:
    answer = roomy.chat(tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, max_tokens=130)
    said = answer.choices[0]
    assert said.finish_reason == "tool_calls"
    (call,) = said.message.tool_calls
    assert call.function.name == "search"
    assert json.loads(call.function.arguments)["word"] in ("a", "b")
    assert said.message.content is None


def test_a_streamed_call_is_the_same_call(roomy: LiveServer) -> None:
    options = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    chunks = list(roomy.chat(stream=True, max_tokens=130, **options))
    calls = [chunk.choices[0].delta.tool_calls for chunk in chunks]
    ((call,),) = [found for found in calls if found]
    assert call.function.name == "search"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert not any(chunk.choices[0].delta.content for chunk in chunks)


def test_with_auto_the_model_may_say_text_before_a_call(roomy: LiveServer) -> None:
    call = '<tool_call>{"name": "search", "arguments": {"word": "b"}}</tool_call>'
    with roomy.engine.saying("hm " + call):
        said = roomy.chat(tools=[TOOL], max_tokens=130).choices[0]
    assert said.message.content == "hm "
    assert json.loads(said.message.tool_calls[0].function.arguments) == {"word": "b"}
    with roomy.engine.saying("only text < tool"):
        said = roomy.chat(tools=[TOOL], max_tokens=130).choices[0]
    assert (said.message.content, said.message.tool_calls) == ("only text < tool", None)


@pytest.mark.parametrize("word", ["</tool_call>", "<tool_call>", "a"])
def test_an_argument_may_hold_the_marks_of_a_call(word: str) -> None:
    call = json.dumps({"name": "search", "arguments": {"word": word}})
    reader = ToolCallReader()
    assert reader.push(f"hm <tool_call>{call}</tool_call> <tool_call>{call}</tool_call>") == "hm "
    rest, calls = reader.finish()
    assert (rest, len(calls)) == ("", 2)
    assert all(json.loads(found.function.arguments) == {"word": word} for found in calls)


@pytest.mark.parametrize("cut", [1, len("</tool_call>"), len('"}}</tool_call>')])
def test_a_call_that_is_cut_off_is_none(cut: int) -> None:
    text = '<tool_call>{"name": "search", "arguments": {"word": "b"}}</tool_call>'
    reader = ToolCallReader()
    reader.push(text + text[:-cut])
    assert len(reader.finish()[1]) == 1


def test_calls_and_results_of_earlier_turns_are_taken(roomy: LiveServer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "found"},
    ]
    assert roomy.chat(messages=messages, max_tokens=1).choices[0].finish_reason == "length"


def test_logprobs_are_finite(server: LiveServer) -> None:
    answer = server.chat(logprobs=True, top_logprobs=20, extra_body={"logit_bias": {"9": -100}})
    for token in answer.choices[0].logprobs.content:
        assert all(math.isfinite(top.logprob) for top in token.top_logprobs)
