"""An answer as the caller iterates over it; lives in the event loop's thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from ..request import Output


class Stream(AsyncIterator[Output]):
    """Outputs of one request; ends after the one that has ``finish``.

    A class and not a generator: a generator that was never started would leave the request running.

    Args:
        enter: awaited before the first output; it may refuse the request.
        leave: called once if the caller goes before the end, perhaps by the garbage collector, in any thread.

    Attributes:
        has_last: the last output is there, read or not.
    """

    def __init__(self, enter: Callable[[], Awaitable[None]] | None, leave: Callable[[], None]) -> None:
        self._enter, self._leave = enter, leave
        self._outputs: asyncio.Queue[Output] = asyncio.Queue()
        self._is_over = False
        self.has_last = False

    def put(self, output: Output) -> None:
        """Nothing follows the last one."""
        if not self.has_last:
            self.has_last = output.finish is not None
            self._outputs.put_nowait(output)

    async def __anext__(self) -> Output:
        if self._is_over:
            raise StopAsyncIteration
        if self._enter is not None:
            enter, self._enter = self._enter, None
            try:
                await enter()
            except BaseException:
                await self.aclose()
                raise
        output = await self._outputs.get()
        self._is_over = output.finish is not None
        return output

    async def aclose(self) -> None:
        """The caller wants no more."""
        self._go()

    def __del__(self) -> None:
        self._go()

    def _go(self) -> None:
        if not self._is_over:
            self._is_over = True
            if not self.has_last:
                self._leave()
