"""Tools over a small corpus, and what becomes of a tool that fails, hangs or finds nothing."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest

from precache.agents import Corpus, Toolbox, ToolError
from precache.agents.tools import NO_IMAGE, NO_PAGE, run_tool
from precache.agents.web_search import WebSearch
from precache.tasks import Passage
from tests.agents.fakes import PAGES, QUESTION


@pytest.fixture
def box() -> Toolbox:
    return Toolbox(QUESTION, Corpus(PAGES))


def test_retrieve_reads_a_page_whatever_its_spelling(box: Toolbox) -> None:
    assert box.retrieve(" paris ") == "Paris is the capital of France. Paris lies on the Seine."


def test_retrieve_of_an_unknown_page_names_similar_ones(box: Toolbox) -> None:
    assert box.retrieve("Rome (city)") == "Could not find [Rome (city)]. Similar: ['Rome']"


def test_search_ranks_by_the_words_of_the_query(box: Toolbox) -> None:
    assert box.search("capital Italy").startswith("Rome: Rome is the capital of Italy.")
    assert box.search('zebra "AND" *') == ""


def test_words_of_questions_do_not_rank() -> None:
    film = Passage("What They Had", ("What They Had is a film of the year.",))
    corpus = Corpus((film, *PAGES))
    assert corpus.search("What is the capital of Italy?", limit=1) == [PAGES[1]]
    assert corpus.search("What they had", limit=1) == [film]


def test_lookup_goes_through_the_open_page(box: Toolbox) -> None:
    assert box.lookup("Seine") == NO_PAGE
    box.retrieve("Paris")
    assert box.lookup("paris") == "(Result 1/2) Paris is the capital of France."
    assert box.lookup("Paris") == "(Result 2/2) Paris lies on the Seine."
    assert box.lookup("Paris") == "No More Results"
    assert box.lookup("zebra") == ""


def test_image_is_described_or_missed() -> None:
    seen = replace(QUESTION, image_text="Image caption: a cat OCR result: nothing")
    assert Toolbox(seen, None).image_to_text("image") == seen.image_text
    assert Toolbox(QUESTION, None).image_to_text("image") == NO_IMAGE


def test_a_tool_that_fails_says_so() -> None:
    result = run_tool("Search", Toolbox(QUESTION, None).search, "x", 5)
    assert result.status == "failed"
    assert result.observation == (
        "Search error, please try again. (there is no search index in this run)"
    )


def test_a_tool_that_hangs_says_so() -> None:
    release = threading.Event()
    result = run_tool("Search", lambda _: str(release.wait(20)), "x", 0.05)
    release.set()
    assert result.status == "timeout"
    assert "no answer within 0.05 seconds" in result.observation


def test_a_tool_that_finds_nothing_says_so(box: Toolbox) -> None:
    result = run_tool("Search", box.search, "zebra", 5)
    assert (result.status, result.observation) == ("empty", "No Results")


def test_web_search_reads_a_recorded_reply() -> None:
    asked = []
    results = [{"title": f"T{n}", "content": f"text {n}", "url": "u"} for n in range(6)]
    reply = json.dumps({"query": "a b", "results": results}).encode()

    def fetch(address: str) -> bytes:
        asked.append(address)
        return reply

    web = WebSearch("http://search.example/", fetch=fetch)
    assert web("a b&c") == "T0: text 0 T1: text 1 T2: text 2 T3: text 3"
    assert asked == ["http://search.example/search?q=a+b%26c&format=json"]


def test_web_search_refuses_other_replies() -> None:
    web = WebSearch("http://search.example", fetch=lambda _: b"<html>")
    assert run_tool("Search", web, "x", 5).status == "failed"
    with pytest.raises(ToolError, match="expected http"):
        WebSearch("file:///etc/passwd")
