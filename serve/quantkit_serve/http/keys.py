"""API keys: who may use what costs something or shows what others do."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from quantkit.errors import UsageError

from .errors import ApiError

ENVIRONMENT = "QUANTKIT_API_KEYS"
OPEN_PATHS = frozenset({"/", "/health", "/metrics", "/version", "/openapi.json"})
OPEN_FOLDER = "/static/"


def read_api_keys(environment: Mapping[str, str], file: Path | None = None) -> tuple[str, ...]:
    """Keys of the variable QUANTKIT_API_KEYS (separated by commas) and of a file (one a line, # starts a comment).

    Raises:
        UsageError: the file can't be read or has no key; a key has other than printable ASCII characters.
    """
    keys = [key.strip() for key in environment.get(ENVIRONMENT, "").split(",")]
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"can't be read: {error}", where=str(file), accepted="one API key a line") from None
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise UsageError("has no API key", where=str(file), accepted="one API key a line")
        keys += found
    keys = [key for key in keys if key]
    if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise UsageError("an API key has other characters", where=ENVIRONMENT if file is None else str(file),
                         accepted="printable ASCII without spaces")  # fmt: skip
    return tuple(dict.fromkeys(keys))


class KeyCheck:
    """Middleware: 401 without one of the keys.

    Digests are compared, all of them, in constant time: neither a key's length nor which one was close shows.
    """

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._digests = [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_open(scope["path"]) or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(401, "a valid API key is needed: Authorization: Bearer KEY")
        await error.response()(scope, receive, send)

    @staticmethod
    def _is_open(path: str) -> bool:
        return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)

    def _is_known(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        digest = sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(matches)
