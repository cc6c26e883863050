"""One thread that does small work in order while the main thread goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

BEHIND = 2  # pieces of work that may wait


class Aside:
    """A context; at its end everything is done. The first error is raised by a later ``do`` or at the end."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "aside")
        self._waiting: deque[Future[Any]] = deque()

    def do(self, work: Callable[..., Any], *arguments: Any) -> None:
        """Do it later; waits while too much waits already."""
        self._waiting.append(self._pool.submit(work, *arguments))
        while len(self._waiting) > BEHIND:
            self._waiting.popleft().result()

    def __enter__(self) -> Aside:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        for future in self._waiting:
            future.result()
