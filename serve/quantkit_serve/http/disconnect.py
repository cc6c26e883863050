"""A client that leaves ends the work done for it, whatever state that is in."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGone(Exception):
    """Nobody is there to be answered."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` returns; it is cancelled when the client leaves, its clean-up waited for.

    The body must have been read: the next message of ``receive`` is then that the client has left.

    Raises:
        ClientGone: the client has left.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
