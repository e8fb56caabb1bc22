"""A small local encyclopedia: passages by title and by BM25. SQLite's FTS5 does the ranking."""

from __future__ import annotations

import difflib
import re
import sqlite3
import threading
from collections.abc import Iterable

from precache.errors import PrecacheError
from precache.tasks.questions import Passage

_TITLE_WEIGHT, _TEXT_WEIGHT = 2.0, 1.0
_WORD = re.compile(r"\w+")
# Words of questions rather than of topics; a page titled "What They Had" answers none of them.
_COMMON = frozenset(
    _WORD.findall(
        "a an and are as at be by did do does for from had has have how in is it its of on or that "
        "the they this to was were what when where which who whom whose why with"
    )
)


class CorpusError(PrecacheError):
    """The search index cannot be built."""


class Corpus:
    """Passages, the first of each title. Calls are safe from several threads."""

    def __init__(self, passages: Iterable[Passage]) -> None:
        self._pages: dict[str, Passage] = {}
        for passage in passages:
            self._pages.setdefault(_key(passage.title), passage)
        self._rows = list(self._pages.values())
        self._lock = threading.Lock()
        self._index = _build_index(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def page(self, title: str) -> Passage | None:
        """Return the passage of a title; case, punctuation and spacing do not count."""
        return self._pages.get(_key(title))

    def search(self, query: str, limit: int) -> list[Passage]:
        """Return the passages that fit the query best (BM25), none if no word is known."""
        return [self._rows[row] for row in self._ranked("pages", query, limit)]

    def similar_titles(self, title: str, limit: int) -> list[str]:
        """Return titles with words in common, best first; then titles that are spelled alike."""
        rows = self._ranked("{title}", title, limit)
        found = [self._rows[row].title for row in rows]
        close = difflib.get_close_matches(_key(title), self._pages, n=limit, cutoff=0.8)
        found += [self._pages[key].title for key in close]
        return list(dict.fromkeys(found))[:limit]

    def _ranked(self, column: str, query: str, limit: int) -> list[int]:
        words = list(dict.fromkeys(_WORD.findall(query.casefold())))
        words = [word for word in words if word not in _COMMON] or words
        if not words:
            return []
        terms = " OR ".join(f'"{word}"' for word in words)
        match = terms if column == "pages" else f"{column} : ({terms})"
        with self._lock:
            rows = self._index.execute(
                "SELECT rowid FROM pages WHERE pages MATCH ? ORDER BY bm25(pages, ?, ?), rowid "
                "LIMIT ?",
                (match, _TITLE_WEIGHT, _TEXT_WEIGHT, limit),
            )
            return [row[0] for row in rows]


def _build_index(rows: list[Passage]) -> sqlite3.Connection:
    index = sqlite3.connect(":memory:", check_same_thread=False)
    try:
        index.execute(
            "CREATE VIRTUAL TABLE pages USING fts5(title, text, tokenize='porter unicode61')"
        )
    except sqlite3.OperationalError as error:
        raise CorpusError(
            f"the SQLite {sqlite3.sqlite_version} of this Python has no FTS5: {error}"
        ) from error
    index.executemany(
        "INSERT INTO pages(rowid, title, text) VALUES (?, ?, ?)",
        [(number, row.title, row.text) for number, row in enumerate(rows)],
    )
    return index


def _key(title: str) -> str:
    return " ".join(_WORD.findall(title.casefold()))
