"""The engine's outputs for one HTTP request: one or several answers at once, in the order in which they grow.

A single answer is read as the engine gives it; of several, each has a task that moves its outputs into one queue.
Leaving, for whatever reason, ends all of them in the engine: ``close`` must be called in any case.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from ..refusal import Refused
from ..request import FinishReason, Output, Request, TokenLogprob
from ..service import Service
from .errors import ApiError
from .metrics import Meter

FIRST_WAIT_S = 1.0  # a refusal or early failure within it gets a status of its own instead of a 200 and an event


@dataclass
class Answer:
    """One that is complete; see ``Output`` for the fields."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0

    def add(self, output: Output) -> None:
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.finish, self.stop_reason = output.finish, output.stop_reason
        self.num_cached_tokens, self.num_generated_tokens = output.num_cached_tokens, output.num_generated_tokens


class Answers:
    """All answers to one HTTP request.

    Args:
        requests: in the order of the choices.

    Raises:
        Refused: the engine takes one of them not; the others are aborted then.
    """

    def __init__(self, service: Service, requests: Sequence[Request], meter: Meter) -> None:
        self._service, self._requests, self._meter = service, requests, meter
        self._queue: asyncio.Queue[tuple[int, Output | Exception]] = asyncio.Queue()
        self._items: AsyncGenerator[tuple[int, Output], None] | None = None
        self._first: asyncio.Future[tuple[int, Output]] | None = None
        self._open = set(range(len(requests)))
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        """Hand in all of them and wait for the first output, but not for long.

        Raises:
            Refused, ApiError: it didn't come to that; everything is closed.
        """
        try:
            outputs = [self._service.submit(request) for request in self._requests]
            self._items = self._single(outputs[0]) if len(outputs) == 1 else self._merged(outputs)
            self._first = asyncio.ensure_future(anext(self._items))
            await asyncio.wait((self._first,), timeout=FIRST_WAIT_S)  # it goes on if it takes longer
            if self._first.done():
                self._first.result()
        except BaseException:
            await self.close()
            raise

    async def outputs(self) -> AsyncIterator[tuple[int, Output]]:
        """(choice, output), to the end of all.

        Raises:
            Refused, ApiError: one of them failed.
        """
        assert self._items is not None and self._first is not None, "begin comes first"
        item = await self._first
        while True:
            index, output = item
            if output.finish is not None:
                self._open.discard(index)
            yield item
            if not self._open:
                return
            item = await anext(self._items)

    async def collected(self) -> list[Answer]:
        """All of them, complete; everything is closed then.

        Raises:
            Refused, ApiError: one of them failed.
        """
        found = [Answer() for _ in self._requests]
        texts: list[list[str]] = [[] for _ in self._requests]
        try:
            await self.begin()
            async for index, output in self.outputs():
                found[index].add(output)
                texts[index].append(output.text)
        finally:
            await self.close()
        for answer, parts in zip(found, texts, strict=True):
            answer.text = "".join(parts)
        return found

    async def close(self) -> None:
        """Abort what has not ended."""
        for index in self._open:
            self._service.abort(self._requests[index].request_id)
        self._open.clear()
        tasks: list[asyncio.Future[Any]] = [*self._tasks, *([] if self._first is None else [self._first])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._items is not None:
            await self._items.aclose()

    async def _single(self, outputs: AsyncIterator[Output]) -> AsyncGenerator[tuple[int, Output], None]:
        async with aclosing(self._timed(outputs)) as timed:
            try:
                async for output in timed:
                    yield self._checked(0, output)
            except Refused as refused:
                raise ApiError.of(refused) from None

    async def _merged(self, outputs: Sequence[AsyncIterator[Output]]) -> AsyncGenerator[tuple[int, Output], None]:
        self._tasks = [asyncio.create_task(self._pump(i, o)) for i, o in enumerate(outputs)]
        while True:
            yield self._checked(*await self._queue.get())

    async def _pump(self, index: int, outputs: AsyncIterator[Output]) -> None:
        try:
            async with aclosing(self._timed(outputs)) as timed:
                async for output in timed:
                    self._queue.put_nowait((index, output))
        except Exception as error:  # goes to the one that reads the queue
            self._queue.put_nowait((index, error))

    async def _timed(self, outputs: AsyncIterator[Output]) -> AsyncGenerator[Output, None]:
        """Of one answer, to its end."""
        timer = self._meter.timer()
        try:
            async for output in outputs:
                timer.add(output)
                yield output
                if output.finish is not None:
                    return
            raise RuntimeError("the engine left an answer without an end")
        finally:
            if (aclose := getattr(outputs, "aclose", None)) is not None:
                await aclose()

    def _checked(self, index: int, item: Output | Exception) -> tuple[int, Output]:
        if isinstance(item, Refused):
            raise ApiError.of(item)
        if isinstance(item, Exception):
            raise item
        if item.finish is FinishReason.ERROR:
            self._open.discard(index)
            message = item.error or "the engine ended this answer with an error"
            raise ApiError(item.error_status, message, code="engine_error" if item.error_status == 500 else None)
        if item.finish is FinishReason.ABORT:
            self._open.discard(index)
            raise ApiError(503, item.error or "the engine ended this answer: the server is shutting down")
        return index, item
