"""The body of a request: how large it may be, and JSON without the freedoms that Python's parser takes.

NaN, lone surrogates and nesting without end are not JSON; they would pass a lenient parser and fail somewhere
later.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pydantic_core
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError


class BodyLimit:
    """Middleware: 413 as soon as the length is announced, or the bytes that have come are too many."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"")
        if announced.isdigit() and (len(announced) > 18 or int(announced) > self._max_bytes):
            await self._error().response()(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise self._error()
            return message

        await self._app(scope, counted, send)

    def _error(self) -> ApiError:
        return ApiError(413, f"the body is too large; at most {self._max_bytes} bytes are accepted")


class StrictRequest(Request):
    """Raises ApiError (400) for what isn't JSON."""

    async def json(self) -> Any:
        try:
            return pydantic_core.from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None


class StrictRoute(APIRoute):
    """Route whose body is JSON and says so (a page elsewhere can send text/plain without asking, never this)."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            if request.method == "POST":
                kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
                if kind != "application/json":
                    raise ApiError(400, f"the Content-Type is {kind or 'missing'}; application/json is needed")
            return await handler(StrictRequest(request.scope, request.receive))

        return strict
