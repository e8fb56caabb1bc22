"""O14: a request is served by the agent it names, or not at all."""

from __future__ import annotations

import openai
import pytest

from tests.server.live import LiveServer


@pytest.mark.parametrize("name", ["plann", " plan", "plan ", "PLAN", "base", ""])
def test_a_wrong_name_is_refused_and_the_names_are_listed(server: LiveServer, name: str) -> None:
    error = server.error("/v1/completions", model=name, prompt="abc", max_tokens=1)
    assert error["status"] == (404 if name else 400)
    if name:
        assert error["code"] == "model_not_found"
        assert all(agent in error["message"] for agent in ("tiny", "plan", "action", "reflect"))


@pytest.mark.parametrize("name", ["tiny", "plan", "action"])
def test_the_answer_names_the_agent_that_was_used(server: LiveServer, name: str) -> None:
    assert server.complete(name).model == name
    assert server.chat(name).model == name
    assert {chunk.model for chunk in server.chat(name, stream=True)} == {name}


def test_agents_differ(server: LiveServer) -> None:
    def first_logprobs(name: str) -> dict[str, float]:
        return server.complete(name, logprobs=5, max_tokens=1).choices[0].logprobs.top_logprobs[0]

    answers = [first_logprobs(name) for name in ("tiny", "plan", "action", "reflect")]
    assert all(a != b for i, a in enumerate(answers) for b in answers[:i])


def test_models_lists_the_base_and_every_adapter(server: LiveServer) -> None:
    models = {model.id: model for model in server.client.models.list()}
    assert list(models) == ["tiny", "plan", "action", "reflect"]
    assert models["plan"].model_dump()["parent"] == "tiny"
    assert server.client.models.retrieve("plan").id == "plan"
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("plann")
