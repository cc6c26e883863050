"""A server of a few lines that answers as it is told, in a thread of its own: real sockets, real chunks.

``/tokenize`` gives one token per character. What ``/v1/completions`` does is a generator of bytes; one that raises
cuts the connection, as a process that dies does.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn

Body = Mapping[str, Any]
Answer = Callable[[Body], AsyncIterator[bytes]]


def event(content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def token(text: str = "x") -> bytes:
    return event({"choices": [{"index": 0, "text": text}]})


def usage(prompt: int, output: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output}})


DONE = b"data: [DONE]\n\n"


async def whole(body: Body) -> AsyncIterator[bytes]:
    """As many tokens as asked for."""
    for _ in range(body["max_tokens"]):
        yield token()
        await asyncio.sleep(0)
    yield usage(len(body["prompt"]), body["max_tokens"])
    yield DONE


class FakeServer:
    """An ASGI app.

    Attributes:
        answer: of a completion.
        requests: bodies that came.
        headers: of each of them.
        most_at_once: requests under way.
    """

    def __init__(self, answer: Answer = whole, *, status: int = 200, models: tuple[str, ...] = ("fake",)) -> None:
        self.answer, self.status, self.models = answer, status, models
        self.requests: list[Body] = []
        self.headers: list[dict[str, str]] = []
        self.now = self.most_at_once = 0
        self.has_tokenizer = True
        self.url = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive()).get("more_body", False) or message["type"] == "http.request":
            body += message["body"]
            if not message.get("more_body"):
                break
        given = json.loads(body or b"{}")
        path = scope["path"]
        if path == "/v1/models":
            await self._json(send, 200, {"data": [{"id": name} for name in self.models]})
        elif path == "/tokenize" and self.has_tokenizer:
            await self._json(send, 200, {"tokens": [ord(c) for c in given["prompt"]]})
        elif path == "/v1/completions":
            self.requests.append(given)
            self.headers.append({k.decode(): v.decode() for k, v in scope["headers"]})
            await self._complete(send, given)
        else:
            await self._json(send, 404, {"detail": "Not Found"})

    async def _complete(self, send: Any, given: Body) -> None:
        if self.status != 200:
            await self._json(send, self.status, {"error": {"message": "too many"}})
            return
        self.now += 1
        self.most_at_once = max(self.most_at_once, self.now)
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [(b"content-type", b"text/event-stream")],
                }
            )
            async for piece in self.answer(given):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            self.now -= 1

    async def _json(self, send: Any, status: int, content: object) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(content).encode()})


@contextmanager
def serving(app: FakeServer) -> Iterator[FakeServer]:
    """While the block runs the app answers at ``app.url``."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        threading.Event().wait(0.005)
    app.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield app
    finally:
        server.should_exit = True
        thread.join()
