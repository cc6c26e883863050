"""Every error as OpenAI's clients expect it: ``{"error": {"message", "type", "param", "code"}}`` and a status.

Source: https://platform.openai.com/docs/guides/error-codes. Bodies that don't validate are 400 there, not 422.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from typing_extensions import TypedDict

from ..refusal import Refused

LOGGER = logging.getLogger("quantkit.serve")
TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}
CODES = {
    401: "invalid_api_key",
    404: "not_found",
    413: "request_too_large",
    429: "rate_limit_exceeded",
    500: "internal_error",
    503: "unavailable",
    504: "timeout",
}
RETRY_AFTER = {429: "1", 503: "5"}  # seconds
MAX_ERRORS = 5  # of one body that are told


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: ErrorDetail


# 422 hides what FastAPI would say of bodies that don't validate
DOCUMENTED: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": what}
    for status, what in (
        (400, "the request can't be served as asked"),
        (401, "no valid API key"),
        (404, "no such model or path"),
        (413, "the body is too large"),
        (421, "a name that this server doesn't answer to"),
        (429, "the queue is full"),
        (500, "the engine ended the answer with an error"),
        (503, "the engine is dead, or the server is shutting down"),
        (504, "the answer took longer than it may"),
    )
}


class ApiError(HTTPException):
    """Anything but success.

    Args:
        status: of HTTP.
        message: what is wrong and what is accepted.
        param: the field it concerns.
        code: for programs; by default that of the status.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status_code=status, detail=message)
        self.param = param
        self.code = code or CODES.get(status)

    @classmethod
    def of(cls, refused: Refused) -> ApiError:
        return cls(refused.status, str(refused), param=refused.param)

    def body(self) -> ErrorBody:
        return {
            "error": {
                "message": self.detail,
                "type": TYPES.get(self.status_code, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        headers = dict(self.headers or {})
        if self.status_code in RETRY_AFTER:
            headers["Retry-After"] = RETRY_AFTER[self.status_code]
        if self.status_code == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status_code, headers)


def install(app: FastAPI) -> None:
    """Make the app answer every exception in this shape."""
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(Refused, _on_refused)
    app.add_exception_handler(Exception, _on_bug)


async def _on_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if isinstance(error, ApiError):
        return error.response()
    known = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    known.headers = error.headers
    return known.response()


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return invalid(error.errors(), error.body).response()


async def _on_refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Refused)
    return ApiError.of(error).response()


async def _on_bug(request: Request, error: Exception) -> JSONResponse:
    """starlette raises it again afterwards, so that the server logs it."""
    return ApiError(500, "the server failed on this request; its log says why").response()


def invalid(errors: Sequence[Any], body: Any = None) -> ApiError:
    """Of pydantic's errors, the first few in one message; values are left out, they can be long or not text."""
    told = [(_path(e["loc"], body), _sentence(e)) for e in errors]
    message = "; ".join(f"{where}: {what}" if where else what for where, what in told[:MAX_ERRORS])
    if len(told) > MAX_ERRORS:
        message += f"; and {len(told) - MAX_ERRORS} more"
    return ApiError(400, message, param=told[0][0] or None)


def _path(location: Sequence[int | str], body: Any) -> str:
    """Of a field in the body. pydantic also names the member of a union that it took (``json_schema`` of
    ``response_format``); those are no fields, so all but the last part must be found in the body."""
    parts, value = [part for part in location if part != "body"], body
    found = []
    for part in parts[:-1]:
        is_there = isinstance(value, dict) and part in value
        is_there = is_there or (isinstance(value, list) and isinstance(part, int) and part < len(value))
        if is_there:
            value = value[part]
        elif isinstance(value, dict | list):
            continue
        found.append(part)
    return ".".join(map(str, [*found, *parts[-1:]]))


def _sentence(error: Mapping[str, Any]) -> str:
    if error["type"] == "extra_forbidden":
        return "this server does not know or support this field"
    if error["loc"] == ("body",) and error["type"] in ("missing", "model_attributes_type", "model_type"):
        return "a JSON object is needed as the body"
    if error["type"] == "missing":
        return "this field is needed"
    message = str(error["msg"])
    return message.removeprefix("Value error, ")
