"""Threads that take units of work in a fixed order; who does which changes nothing but the time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from .progress import Stopped, Ticker

Unit = TypeVar("Unit")


class Crew(Generic[Unit]):
    """Threads that take units in order until none is left or one fails."""

    def __init__(self, units: deque[Unit], work: Callable[[Unit], None], ticker: Ticker) -> None:
        self._units, self._work, self._ticker = units, work, ticker
        self._problem: BaseException | None = None
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def run(self, workers: int) -> None:
        count = max(1, min(workers, len(self._units)))
        self._threads = [
            threading.Thread(target=self._loop, name=f"convert-{i}", daemon=True) for i in range(count)
        ]
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            while thread.is_alive():
                thread.join(0.5)  # short waits: a signal must reach the main thread
        if self._problem is not None:
            raise self._problem

    def add(self, units: Iterable[Unit]) -> None:
        """More to do, by the thread that says so at least; sooner than the rest, while the source is warm."""
        with self._lock:
            self._units.extendleft(units)

    def stop(self) -> None:
        """Stop at the next tile and wait for it."""
        self._ticker.stop()
        for thread in self._threads:
            thread.join()

    def _loop(self) -> None:
        while True:
            with self._lock:
                if not self._units or self._problem is not None:
                    return
                unit = self._units.popleft()
            try:
                self._work(unit)
            except Stopped:
                return
            except BaseException as problem:
                with self._lock:
                    self._problem = self._problem or problem
                self._ticker.stop()
                return
