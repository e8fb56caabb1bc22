"""The tools of one episode, and how a call becomes an observation whatever happens.

A tool is a function from an argument to text. Empty text means that it found nothing; an
exception that it failed; `run_tool` turns both, and a time-out, into an observation.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from precache.agents.corpus import Corpus
from precache.errors import PrecacheError
from precache.tasks.questions import Passage, Question

Tool = Callable[[str], str]
ToolStatus = Literal["ok", "empty", "failed", "timeout", "builtin"]

SEARCH_RESULTS = 2
SIMILAR_TITLES = 5
RESULT_CHARS = 190  # two results fit into one observation of 400 characters

NO_PAGE = (
    "The last page Retrieved was not found, so you cannot Lookup a keyword in it. "
    "Please try one of the similar pages given."
)
NO_IMAGE = "This question doesn't have an image."


class ToolError(PrecacheError):
    """A tool could not answer; the message becomes part of the observation."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the roles read, and how it came about."""

    observation: str
    status: ToolStatus
    seconds: float


def run_tool(name: str, tool: Tool, argument: str, timeout_s: float) -> ToolResult:
    """Call a tool. Never raises: the episode goes on with an observation that says what happened.

    After a time-out the call goes on in its (daemon) thread and its answer is dropped.
    """
    answers: list[str] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            answers.append(tool(argument))
        except Exception as error:  # any tool of a user's; reported in the observation
            errors.append(error)

    started = time.perf_counter()
    thread = threading.Thread(target=work, daemon=True, name=f"tool-{name}")
    thread.start()
    thread.join(timeout_s)
    seconds = time.perf_counter() - started
    if errors:
        reason = str(errors[0]) or type(errors[0]).__name__
        return ToolResult(f"{name} error, please try again. ({reason})", "failed", seconds)
    if not answers:
        text = f"{name} gave no answer within {timeout_s:g} seconds, please try again."
        return ToolResult(text, "timeout", seconds)
    if not answers[0].strip():
        return ToolResult("No Results", "empty", seconds)
    return ToolResult(answers[0], "ok", seconds)


class Toolbox:
    """The tools of one question. Owns the page that Retrieve or Search opened last, for Lookup."""

    def __init__(
        self, question: Question, corpus: Corpus | None, search: Tool | None = None
    ) -> None:
        self._question = question
        self._corpus = corpus
        self._search = search
        self._page: Passage | None = None
        self._keyword = ""
        self._num_read = 0

    def tools(self) -> Mapping[str, Tool]:
        """Return every tool by its name in the workflow."""
        return {
            "Search": self._search or self.search,
            "Retrieve": self.retrieve,
            "Lookup": self.lookup,
            "Image2Text": self.image_to_text,
        }

    def search(self, query: str) -> str:
        """Return the best passages for a query, title first; the best becomes the open page."""
        found = self._require_corpus().search(query, limit=SEARCH_RESULTS)
        if found:
            self._open(found[0])
        return " ".join(_shorten(f"{page.title}: {page.text}", RESULT_CHARS) for page in found)

    def retrieve(self, entity: str) -> str:
        """Return the page of that title, or the titles that come nearest."""
        corpus = self._require_corpus()
        page = corpus.page(entity)
        self._open(page)
        if page is not None:
            return page.text
        similar = corpus.similar_titles(entity, limit=SIMILAR_TITLES)
        return f"Could not find [{entity}]. Similar: {similar}"

    def lookup(self, keyword: str) -> str:
        """Return the next sentence of the open page that holds the keyword."""
        if self._page is None:
            return NO_PAGE
        if keyword.casefold() != self._keyword:
            self._keyword, self._num_read = keyword.casefold(), 0
        hits = [s for s in self._page.sentences if self._keyword in s.casefold()]
        if not hits:
            return ""
        if self._num_read == len(hits):
            return "No More Results"
        self._num_read += 1
        return f"(Result {self._num_read}/{len(hits)}) {hits[self._num_read - 1]}"

    def image_to_text(self, _: str) -> str:
        """Return the caption and the recognised words of the question's image."""
        return self._question.image_text or NO_IMAGE

    def _require_corpus(self) -> Corpus:
        if self._corpus is None:
            raise ToolError("there is no search index in this run")
        return self._corpus

    def _open(self, page: Passage | None) -> None:
        self._page, self._keyword, self._num_read = page, "", 0


def _shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else re.sub(r"\s+\S*$", "", text[: limit - 3]) + "..."
