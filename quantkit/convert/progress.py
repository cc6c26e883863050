"""Counts what a conversion has done, and carries the word to stop."""

from __future__ import annotations

import threading

from ..artifact.progress import OnProgress, Progress

__all__ = ["OnProgress", "Progress", "Stopped", "Ticker"]


class Stopped(Exception):
    """Raised inside a worker when another worker failed or the user interrupted; never leaves the executor."""


class Ticker:
    """Counts bytes from many threads, reports them, and is where workers notice that they should stop."""

    def __init__(self, total_bytes: int, on_progress: OnProgress | None) -> None:
        self.total_bytes = total_bytes
        self._on_progress = on_progress
        self._done = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def stop(self) -> None:
        self._stop.set()

    def check(self) -> None:
        if self._stop.is_set():
            raise Stopped

    def grow(self, nbytes: int) -> None:
        """There is more to do than was known."""
        with self._lock:
            self.total_bytes += nbytes

    def add(self, stage: str, unit: str, nbytes: int) -> None:
        """Report progress; raises Stopped when it is time to stop."""
        self.check()
        with self._lock:
            self._done += nbytes
            if self._on_progress is not None:
                self._on_progress(Progress(stage, unit, self._done, self.total_bytes))
