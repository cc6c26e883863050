"""Threads that compute with one torch thread each, so that their number changes no bit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
R = TypeVar("R")


class Workers:
    """Threads that compute with one torch thread each.

    Args:
        count: how many tasks at once. Changes no number.
    """

    def __init__(self, count: int) -> None:
        import torch

        self._before = torch.get_num_threads()
        self.count = count
        self._pool = ThreadPoolExecutor(count, "calibrate", initializer=lambda: torch.set_num_threads(1))

    def ordered(self, work: Callable[[A], R], items: Iterable[A], ahead: int = 1) -> Generator[R]:
        """Results in the order of the items, with up to ``ahead`` tasks of each thread ahead of who takes them."""
        waiting: deque[Future[R]] = deque()
        try:
            for item in items:
                waiting.append(self._pool.submit(_without_gradients, work, item))
                if len(waiting) > self.count * ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def close(self) -> None:
        """Wait for what runs, drop what waits."""
        import torch

        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._before)


def _without_gradients(work: Callable[[A], R], item: A) -> R:
    import torch

    with torch.no_grad():  # the mode belongs to the thread
        return work(item)
