"""A scripted client, a small question with a page to read, and a workflow in which two roles just talk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from precache.agents import (
    ForcedOutput,
    TurnOutput,
    TurnRefusedError,
    TurnRequest,
    parse_workflow,
)
from precache.request import Timings, Usage
from precache.tasks import Passage, Question

RIGHT = (" I know.", " Finish", "Paris", " It is.", " Reflect[right]")
PAGES = (
    Passage("Paris", ("Paris is the capital of France.", "Paris lies on the Seine.")),
    Passage("Rome", ("Rome is the capital of Italy.",)),
)
QUESTION = Question("q1", "easy", "What is the capital of France?", "Paris", passages=PAGES)

TALK = parse_workflow(
    {
        "name": "talk",
        "header": "Tell a story about the question {question}\n",
        "start": "plan",
        "turns": {
            "plan": {"role": "plan", "cue": "P {step}:", "max_tokens": 2, "next": "action"},
            "action": {"role": "action", "cue": "A {step}:", "max_tokens": 2, "next": "plan"},
        },
        "bounds": {"max_steps": 3},
    }
)


def num_shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


class ScriptedClient:
    """Says the given texts in order; a text that ends in `...` hit the token limit."""

    def __init__(self, texts: Iterable[str], *, usage: bool = True) -> None:
        self._texts: Iterator[str] = iter(texts)
        self._usage = usage
        self.requests: list[TurnRequest] = []
        self.num_episodes = 0

    def begin_episode(self) -> None:
        self.num_episodes += 1

    def complete(self, request: TurnRequest) -> TurnOutput:
        self.requests.append(request)
        text = next(self._texts, None)
        if text is None:
            raise TurnRefusedError("the script is over")
        reason = "length" if text.endswith("...") else "stop"
        usage = Usage(len(request.prompt) // 4, len(text) // 4 + 1, 0) if self._usage else None
        return TurnOutput(text.removesuffix("..."), reason, Timings(0.1, 0.2), usage)

    def force(self, request: TurnRequest, text: str) -> ForcedOutput:
        self.requests.append(request)
        return ForcedOutput("Paris" in text, 0.1, 10, 5.0, 9)
