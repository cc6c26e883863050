"""Which names a server on the loopback interface answers to.

A page elsewhere can let its own name point to 127.0.0.1 (DNS rebinding) and is then, to the browser, at home
here: no CORS, no preflight. What it can't do is send another Host than its name. So without a key, a server
that only this machine should reach answers to addresses and to ``localhost`` alone.
"""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import ApiError

MISDIRECTED = 421


class HostCheck:
    """Middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_local(dict(scope["headers"]).get(b"host", b"").decode("latin-1")):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            MISDIRECTED,
            "this server answers to localhost and to addresses only; start it with an API key to let it answer to "
            "other names",
        )
        await error.response()(scope, receive, send)


def is_local(host: str) -> bool:
    """Of a Host header: ``localhost``, an address of either kind, or nothing; with or without a port."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name in ("", "localhost") or bool(ip_address(name))
    except ValueError:
        return False
