"""A client that leaves, in each state that a request can be in, takes its work with it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fastapi import FastAPI

from .fakes import FakeService, bundled, make

SCOPE: dict[str, Any] = {
    "type": "http",
    "asgi": {"version": "3.0", "spec_version": "2.3"},
    "http_version": "1.1",
    "query_string": b"",
    "root_path": "",
    "scheme": "http",
    "server": ("test", 80),
    "client": ("c", 1),
}


class Connection:
    """One request as a server would hand it in; ``leave`` is the client's."""

    def __init__(self, app: FastAPI, path: str, body: Any) -> None:
        self._body = json.dumps(body).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(self._body)).encode())]
        scope = {**SCOPE, "method": "POST", "path": path, "raw_path": path.encode(), "headers": headers}
        self._left = asyncio.Event()
        self._is_read = False
        self.sent: list[dict[str, Any]] = []
        self.first_text = asyncio.Event()
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    def leave(self) -> None:
        self._left.set()

    async def _receive(self) -> dict[str, Any]:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        if b'"content":"The"' in message.get("body", b"") or b'"text":"The"' in message.get("body", b""):
            self.first_text.set()


def body(path: str, stream: bool, n: int) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
    return {**prompt, "stream": stream, "n": n}


async def until(condition: Any) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("waited in vain")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("stream", "pause_at"), [(False, 0), (False, 3), (True, 0), (True, 3)],
    ids=["whole-waiting", "whole-running", "stream-waiting", "stream-running"],
)  # fmt: skip
def test_leaving(path: str, n: int, stream: bool, pause_at: int) -> None:
    async def run() -> None:
        service, app = make()
        service.pause, service.pause_at = asyncio.Event(), pause_at
        connection = Connection(app, path, body(path, stream, n))
        await until(lambda: len(service.live) == n)
        if stream and pause_at:
            await connection.first_text.wait()
        connection.leave()
        await asyncio.wait_for(connection.task, 5)
        assert len(service.requests) == n
        assert service.aborted == {r.request_id for r in service.requests}
        assert service.live == set()
        assert app.state.context.gate.num_inside == 0

    asyncio.run(run())


def test_leaving_while_the_prompt_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        service, app = make()
        started = asyncio.Event()

        async def slow(*args: Any, **kwargs: Any) -> list[int]:
            started.set()
            await asyncio.sleep(60)
            return []

        monkeypatch.setattr(bundled(), "encoded", slow)
        connection = Connection(app, "/v1/completions", body("", False, 1))
        await started.wait()
        connection.leave()
        await asyncio.wait_for(connection.task, 5)
        assert service.requests == []

    asyncio.run(run())


@pytest.mark.parametrize("at", [0, 4])
def test_a_send_that_fails(at: int) -> None:
    """Some servers raise OSError at a send after the client has left, even at the first."""

    async def run() -> None:
        service, app = make()
        connection = Connection(app, "/v1/completions", body("", True, 2))
        kept = connection._send

        async def failing(message: Any) -> None:
            if len(connection.sent) >= at:
                raise OSError("gone")
            await kept(message)

        connection.task.cancel()
        scope = {**SCOPE, "method": "POST", "path": "/v1/completions", "raw_path": b"", "headers": [
            (b"content-type", b"application/json")]}  # fmt: skip
        await asyncio.wait_for(app(scope, connection._receive, failing), 5)
        assert service.live == set() and len(service.aborted) == 2

    asyncio.run(run())


def test_an_answer_that_ended_is_not_aborted() -> None:
    async def run() -> None:
        service, app = make()
        connection = Connection(app, "/v1/completions", body("", False, 1))
        await asyncio.wait_for(connection.task, 5)
        assert service.aborted == set() and connection.sent[0]["status"] == 200

    asyncio.run(run())


def test_a_cancelled_server_task_aborts() -> None:
    async def run() -> None:
        service: FakeService
        service, app = make()
        service.pause = asyncio.Event()
        connection = Connection(app, "/v1/completions", body("", False, 2))
        await until(lambda: len(service.live) == 2)
        connection.task.cancel()
        await asyncio.gather(connection.task, return_exceptions=True)
        assert service.live == set() and len(service.aborted) == 2

    asyncio.run(run())
