"""The live page: three files of the package, put together into one document with a strict policy.

Nothing on it comes from elsewhere, and nothing but its own script and style may run: both are named by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from typing import NamedTuple

from starlette.responses import HTMLResponse


class _Page(NamedTuple):
    html: str
    headers: dict[str, str]


def page_response(status: int = 200, headers: Mapping[str, str] | None = None) -> HTMLResponse:
    """The page; it holds no data, which its script asks for."""
    page = _page()
    return HTMLResponse(page.html, status, headers={**page.headers, **(headers or {})})


@lru_cache(maxsize=1)
def _page() -> _Page:
    folder = files(__name__)
    style = "\n" + folder.joinpath("live.css").read_text("utf-8")
    script = "\n" + folder.joinpath("live.js").read_text("utf-8")
    html = folder.joinpath("index.html").read_text("utf-8")
    html = html.replace("<style></style>", f"<style>{style}</style>")
    html = html.replace("<script></script>", f"<script>{script}</script>")
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return _Page(
        html,
        {
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        },
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
