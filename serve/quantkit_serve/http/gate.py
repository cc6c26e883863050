"""The gate: closed while the server drains. Requests inside go on, new ones are told to go elsewhere."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import ApiError


class Gate:
    """Counts requests inside.

    Attributes:
        is_open: new ones may come in.
        num_inside: that came in and have not been answered to the end.
    """

    def __init__(self) -> None:
        self.is_open = True
        self.num_inside = 0
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def enter(self) -> None:
        self.num_inside += 1
        self._is_empty.clear()

    def leave(self) -> None:
        self.num_inside -= 1
        if self.num_inside == 0:
            self._is_empty.set()

    def close(self) -> None:
        """For good."""
        self.is_open = False

    async def emptied(self, timeout_s: float) -> bool:
        """Wait until nobody is inside; whether that came true in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_empty.wait()
        except TimeoutError:
            return False
        return True


class GateKeeper:
    """Middleware: 503 for new work (POST) at a closed gate; health, metrics and the page stay reachable."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app, self._gate = app, gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if not self._gate.is_open:
            error = ApiError(503, "the server is shutting down and takes no new requests")
            await error.response()(scope, receive, send)
            return
        self._gate.enter()
        try:
            await self._app(scope, receive, send)
        finally:
            self._gate.leave()
