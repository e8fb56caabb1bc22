"""Server-sent events: one data line per chunk, ``[DONE]`` at the end, an error event if something breaks on the way."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

from fastapi.responses import StreamingResponse
from fastapi.sse import format_sse_event
from pydantic import BaseModel

from precache.server.errors import api_error
from precache.server.service import ClientGoneError

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies must not wait


async def event_stream(chunks: AsyncIterator[BaseModel]) -> StreamingResponse:
    """Answer with a stream of chunks. What fails before the first one is raised, as an ordinary answer."""
    first = await anext(chunks)
    return StreamingResponse(
        _events(first, chunks), media_type="text/event-stream", headers=_HEADERS
    )


async def _events(first: BaseModel, chunks: AsyncIterator[BaseModel]) -> AsyncIterator[bytes]:
    yield _event(first)
    try:
        async for chunk in chunks:
            yield _event(chunk)
        yield format_sse_event(data_str="[DONE]")
    except ClientGoneError:
        return
    except Exception as error:
        yield format_sse_event(data_str=json.dumps(api_error(error).body()))


def _event(chunk: BaseModel) -> bytes:
    return format_sse_event(data_str=chunk.model_dump_json())
