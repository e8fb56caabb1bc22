"""O18-O24: what frameworks send is taken, what cannot be served is refused by name, lengths and usage are right."""

from __future__ import annotations

import json

import openai
import pytest

from tests.server.conftest import Serve
from tests.server.live import LiveServer

# -- O19: shapes -------------------------------------------------------------------------------------------------


def test_text_parts_are_one_text(server: LiveServer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    whole = server.chat(text="ab")
    again = server.chat(messages=[{"role": "user", "content": parts}])
    assert again.usage.prompt_tokens == whole.usage.prompt_tokens
    assert again.usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens - 1


def test_harmless_fields_are_taken(server: LiveServer) -> None:
    harmless = {
        "stop": None,
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "functions": None,
        "reasoning_effort": None,
        "seed": None,
        "logit_bias": None,
    }
    messages = [
        {"role": "user", "name": "u", "content": "a"},
        {"role": "assistant", "content": "b", "refusal": None, "function_call": None},
        {"role": "user", "content": "c"},
    ]
    response = server.post(
        "/v1/chat/completions", model="plan", messages=messages, max_tokens=1, **harmless
    )
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "end"),
        ("best_of", 3),
        ("functions", [{"name": "f"}]),
        ("reasoning_effort", "high"),
        ("guided_regex", "a+"),
        ("min_tokens", 3),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    server: LiveServer, field: str, value: object
) -> None:
    error = server.error("/v1/completions", model="plan", prompt="a", **{field: value})
    assert error["status"] == 400
    assert field in error["message"]


def test_an_image_is_refused(server: LiveServer) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:,"}}
    messages = [{"role": "user", "content": [part]}]
    error = server.error("/v1/chat/completions", model="plan", messages=messages)
    assert "text" in error["message"]


def test_a_template_that_refuses_names_the_roles(serve: Serve) -> None:
    with serve() as server:
        tokenizer = server.engine.tokenizer
        assert tokenizer is not None
        tokenizer._tokenizer.chat_template = (  # as strict as Mistral's and Gemma's
            "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
            "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['content'] }}{% endfor %}"
        )
        messages = [{"role": "user", "content": text} for text in "ab"]
        error = server.error("/v1/chat/completions", model="plan", messages=messages)
        assert error["status"] == 400
        assert "['user', 'user']" in error["message"]


# -- O18: control tokens -----------------------------------------------------------------------------------------


def test_chat_and_its_token_ids_are_the_same_prompt(server: LiveServer) -> None:
    assert server.engine.tokenizer is not None
    ids = server.engine.tokenizer.encode_prompt([{"role": "user", "content": "hello"}])
    assert ids.count(1) == 1  # one BOS
    prompt_tokens = server.chat(text="hello").usage.prompt_tokens
    usage = server.complete(prompt=ids).usage
    assert usage.prompt_tokens == prompt_tokens
    assert usage.prompt_tokens_details.cached_tokens == prompt_tokens - 1


def test_a_control_token_in_a_message_is_text(server: LiveServer) -> None:
    plain = server.chat(text="").usage.prompt_tokens
    assert server.chat(text="</s>").usage.prompt_tokens == plain + len("</s>")


# -- O20, O21: text ----------------------------------------------------------------------------------------------


def streamed(server: LiveServer, **options: object) -> tuple[list[str], str]:
    pieces, finish = [], ""
    for chunk in server.chat(stream=True, max_tokens=30, **options):
        pieces.append(chunk.choices[0].delta.content or "")
        finish = chunk.choices[0].finish_reason or finish
    return [piece for piece in pieces if piece], finish


def test_no_part_of_a_stop_string_is_streamed(server: LiveServer) -> None:
    with server.engine.saying("x\nObservation: y"):
        pieces, finish = streamed(server, stop="\nObservation")
    assert ("".join(pieces), finish) == ("x", "stop")


def test_text_that_did_not_become_a_stop_string_comes_out(server: LiveServer) -> None:
    with server.engine.saying("x\nObs"):
        pieces, finish = streamed(server, stop=["\nObservation"])
    assert ("".join(pieces), finish) == ("x\nObs", "stop")


def test_the_end_of_sequence_ends_in_spite_of_stop_strings(server: LiveServer) -> None:
    with server.engine.saying("xy"):
        answer = server.chat(stop=["never"], max_tokens=30)
    assert answer.choices[0].message.content == "xy"
    assert answer.choices[0].finish_reason == "stop"


def test_a_character_of_two_tokens_is_one_piece(server: LiveServer) -> None:
    with server.engine.saying("αβ"):
        pieces, _ = streamed(server)
    assert pieces == ["α", "β"]


def test_a_character_cut_in_the_middle_is_valid_json(server: LiveServer) -> None:
    with server.engine.saying("αβ", eos=False):
        response = server.post(
            "/v1/completions", model="plan", prompt="a", max_tokens=3, temperature=0
        )
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["text"].startswith("α")


@pytest.mark.parametrize("temperature", [0, 1])
def test_streamed_text_is_the_whole_text(server: LiveServer, temperature: float) -> None:
    options = {"temperature": temperature, "seed": 7, "max_tokens": 24, "ignore_eos": True}
    whole = server.post("/v1/completions", model="plan", prompt="abc", **options).json()
    extra = {"ignore_eos": True}
    del options["ignore_eos"]
    stream = server.complete(prompt="abc", stream=True, extra_body=extra, **options)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole["choices"][0]["text"]


# -- O22: usage --------------------------------------------------------------------------------------------------


def test_usage_is_the_same_streamed_and_not(server: LiveServer) -> None:
    def whole() -> object:
        return server.chat().usage

    def stream() -> object:
        chunks = list(server.chat(stream=True, stream_options={"include_usage": True}))
        assert [chunk for chunk in chunks if not chunk.choices] == chunks[-1:]
        assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        return chunks[-1].usage

    for ask in (whole, stream):
        server.engine.reset()
        cold, warm = ask(), ask()
        assert cold.prompt_tokens_details.cached_tokens == 0  # type: ignore[attr-defined]
        assert warm.prompt_tokens_details.cached_tokens == cold.prompt_tokens - 1  # type: ignore[attr-defined]
        assert cold.completion_tokens == warm.completion_tokens == 4  # type: ignore[attr-defined]


def test_without_being_asked_no_chunk_is_empty(server: LiveServer) -> None:
    assert all(chunk.choices and chunk.usage is None for chunk in server.chat(stream=True))


def test_a_stream_ends_with_done(server: LiveServer) -> None:
    body = {"model": "plan", "prompt": "a", "max_tokens": 2, "stream": True}
    lines = server.post("/v1/completions", **body).text.strip().split("\n\n")
    assert lines[-1] == "data: [DONE]"
    assert all(json.loads(line.removeprefix("data: ")) for line in lines[:-1])


# -- O23, O24: lengths -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_limit_the_output(server: LiveServer, name: str) -> None:
    with server.engine.saying("abcdefgh"):
        answer = server.chat(**{name: 4})
    assert answer.usage.completion_tokens == 4
    assert answer.choices[0].finish_reason == "length"


def test_the_newer_name_wins(server: LiveServer) -> None:
    with server.engine.saying("abcdefgh"):
        answer = server.chat(max_completion_tokens=4, extra_body={"max_tokens": 2})
    assert answer.usage.completion_tokens == 4


def test_an_end_at_the_limit_is_a_stop(server: LiveServer) -> None:
    with server.engine.saying("abc"):
        answer = server.chat(max_completion_tokens=4)
    assert answer.usage.completion_tokens == 4
    assert answer.choices[0].finish_reason == "stop"


def test_a_prompt_that_fills_the_context_is_refused(server: LiveServer) -> None:
    error = server.error("/v1/completions", model="plan", prompt=[20] * 256)
    assert (error["status"], error["code"]) == (400, "context_length_exceeded")
    assert error["message"].count("256") == 2
    error = server.error("/v1/completions", model="plan", prompt=[20] * 200, max_tokens=57)
    assert all(number in error["message"] for number in ("200", "57", "256"))


def test_one_token_of_room_gives_one_token(server: LiveServer) -> None:
    for cached in (0, 254):
        answer = server.complete(prompt=[20] * 255, max_tokens=None)
        assert answer.usage.completion_tokens == 1
        assert answer.usage.prompt_tokens_details.cached_tokens == cached


@pytest.mark.parametrize("stream", [False, True])
def test_an_overlong_prompt_is_refused_before_the_status(server: LiveServer, stream: bool) -> None:
    before = server.engine.stats().lookups
    with pytest.raises(openai.BadRequestError) as refused:
        server.complete(prompt=[20] * 256, stream=stream)
    assert refused.value.code == "context_length_exceeded"
    assert server.engine.stats().lookups == before  # nothing was computed


def test_a_fault_in_the_middle_of_a_stream_is_an_event(server: LiveServer) -> None:
    server.engine.fail_at = 3
    try:
        with server.engine.saying("abcdefgh"), pytest.raises(openai.APIError) as broken:
            list(server.complete(stream=True, max_tokens=8))
        body = {"model": "plan", "prompt": "abc", "max_tokens": 8, "stream": True}
        events = server.post("/v1/completions", **body).text.strip().split("\n\n")
    finally:
        server.engine.fail_at = None
    assert "injected" not in str(broken.value)  # what happened inside is in the log
    assert "error" in json.loads(events[-1].removeprefix("data: "))
    assert server.complete().usage.completion_tokens == 4


def test_a_fault_before_the_first_token_is_a_status(server: LiveServer) -> None:
    server.engine.fail_at = 1
    try:
        with pytest.raises(openai.InternalServerError):
            server.complete(stream=True)
    finally:
        server.engine.fail_at = None
