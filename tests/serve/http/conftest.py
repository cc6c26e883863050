"""An app over a fake engine, asked without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from .fakes import FakeService, make


class Client:
    """Asks an app; no test needs to be async."""

    def __init__(self, app: FastAPI, **headers: str) -> None:
        self.app, self.headers = app, headers

    def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://test", headers=self.headers
            ) as client:
                return await client.request(method, path, **more)

        return asyncio.run(ask())

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.request("GET", path, **more)

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return self.request("POST", path, **({"json": body} if body is not None else {}), **more)

    def events(self, path: str, body: Any) -> list[Any]:
        """Of a stream; the last is "[DONE]"."""
        got = self.post(path, body)
        assert got.status_code == 200, got.text
        assert got.headers["content-type"].startswith("text/event-stream")
        *parts, rest = got.text.split("\n\n")
        assert rest == ""
        data = [part.removeprefix("data: ") for part in parts]
        return [json.loads(d) if d != "[DONE]" else d for d in data]


@pytest.fixture(scope="session")
def made() -> tuple[FakeService, FastAPI]:
    return make()


@pytest.fixture
def service(made: tuple[FakeService, FastAPI]) -> FakeService:
    made[0].reset()
    return made[0]


@pytest.fixture
def client(made: tuple[FakeService, FastAPI], service: FakeService) -> Client:
    return Client(made[1])


@pytest.fixture
def refused(client: Client) -> Callable[..., str]:
    """Posts; expects an error of this status about this field; returns its message."""

    def post(path: str, body: Any, param: str | None, status: int = 400) -> str:
        got = client.post(path, body)
        assert got.status_code == status, got.text
        error = got.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["param"] == param, error
        return str(error["message"])

    return post
