"""Server-sent events as OpenAI's API uses them: ``data: JSON`` each, ``data: [DONE]`` last.

starlette's StreamingResponse leaves a generator that never started unclosed, and notices a client that has left
only with some servers; here both are certain, because pages and compute hang on it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .disconnect import ClientGone, while_connected

DONE = b"data: [DONE]\n\n"


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def event(data: Mapping[str, Any]) -> bytes:
    return f"data: {_encode(data)}\n\n".encode()


class EventStream(Response):
    """Response.

    Args:
        events: encoded, in order.
        close: awaited in any case at the end, started or not.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], Awaitable[None]]) -> None:
        self.status_code = 200
        self.background = None
        self._events, self._close = events, close
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send(send))
        except (ClientGone, OSError):  # servers may raise OSError at a send after the client has left
            pass
        finally:
            await self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
