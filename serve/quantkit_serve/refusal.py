"""Why a request is not taken: what HTTP answers with 400, 429 or 503. Start-up errors are quantkit.errors."""

from __future__ import annotations


class Refused(ValueError):
    """A request that can't be served as asked.

    Args:
        what: names the value and what is accepted.
        param: the field of the request.
    """

    status = 400

    def __init__(self, what: str, *, param: str | None = None) -> None:
        super().__init__(what)
        self.param = param


class Overloaded(Refused):
    """The queue is full; later is fine."""

    status = 429


class Unavailable(Refused):
    """The engine is dead, or the server is draining."""

    status = 503
