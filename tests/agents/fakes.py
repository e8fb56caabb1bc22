"""A scripted client, and one small question with a page to read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from precache.agents import ForcedOutput, TurnOutput, TurnRefusedError, TurnRequest
from precache.request import Timings, Usage
from precache.tasks import Passage, Question

RIGHT = (" I know.", " Finish", "Paris", " It is.", " Reflect[right]")
PAGES = (
    Passage("Paris", ("Paris is the capital of France.", "Paris lies on the Seine.")),
    Passage("Rome", ("Rome is the capital of Italy.",)),
)
QUESTION = Question("q1", "easy", "What is the capital of France?", "Paris", passages=PAGES)


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
