"""Search on the web as a tool: off unless `--search-url` names an instance of SearXNG.

Any function from a query to text can take its place (`Toolbox(search=...)`). This one asks
`GET {url}/search?q=...&format=json` and reads `results[].title` and `results[].content`.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any

from precache.agents.tools import ToolError

NUM_RESULTS = 4
MAX_REPLY_BYTES = 1_000_000

Fetch = Callable[[str], bytes]  # an address -> the body of the reply


class WebSearch:
    """The tool. `fetch` is replaced by recorded replies in tests."""

    def __init__(self, url: str, *, timeout_s: float = 10.0, fetch: Fetch | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ToolError(f"search url: got {url!r}, expected http:// or https://")
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._fetch = fetch or self._get

    def __call__(self, query: str) -> str:
        """Return the snippets of the first results, or nothing. Raises ToolError."""
        address = f"{self._url}/search?{urllib.parse.urlencode({'q': query, 'format': 'json'})}"
        return " ".join(_snippets(self._fetch(address)))

    def _get(self, address: str) -> bytes:
        try:
            with urllib.request.urlopen(address, timeout=self._timeout_s) as reply:
                body: bytes = reply.read(MAX_REPLY_BYTES)
        except (urllib.error.URLError, TimeoutError) as error:
            raise ToolError(f"the search engine cannot be reached: {error}") from error
        return body


def _snippets(body: bytes) -> list[str]:
    try:
        results: list[dict[str, Any]] = json.loads(body)["results"]
        return [f"{item['title']}: {item.get('content') or ''}" for item in results[:NUM_RESULTS]]
    except (ValueError, KeyError, TypeError) as error:
        raise ToolError(f"the search engine's reply is not SearXNG's JSON: {error}") from error
