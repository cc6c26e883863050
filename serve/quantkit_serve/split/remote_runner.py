"""Steps of one phase in a worker that is started again, in the background, whenever it has ended.

A thread keeps the worker: starts it, waits for its end, starts the next. It is the one that the kernel ties the
worker's life to (``worker``), so it lasts until ``close``. ``run`` is called by another one, which learns at once
that a step is lost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import QuantkitError

from ..batch import Batch, StepLost
from ..phase import Phase
from .memory import SharedMemory
from .process import Identity, Opening, WorkerFailed, WorkerProcess

_PAUSES_S = (0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # before a start, by how many ended early
_EARLY_S = 10.0

_log = logging.getLogger(__name__)


class Outage(NamedTuple):
    """Why there is no worker, and since when (``time.monotonic``)."""

    reason: str
    since_s: float


class RemoteRunner:
    """See the module.

    Args:
        phase: of its steps.
        opening: what its worker opens.
        num_threads: of its worker.
        pool: memory of the pages.
        step_limit_s, load_limit_s: see ``SplitConfig``.
        accept: raises QuantkitError if such a worker can't be worked with.
        on_change: called, by any thread, when a worker has come or gone.

    Attributes:
        num_starts: workers that were ready to work.
        num_pages: of the pool; set before the first step.
    """

    def __init__(
        self,
        phase: Phase,
        opening: Opening,
        num_threads: int,
        pool: SharedMemory,
        *,
        step_limit_s: float,
        load_limit_s: float,
        accept: Callable[[Phase, Identity], None],
        on_change: Callable[[], None],
    ) -> None:
        self.phase, self.num_starts, self.num_pages = phase, 0, 0
        self._opening, self._num_threads, self._pool = opening, num_threads, pool
        self._step_limit_s, self._load_limit_s = step_limit_s, load_limit_s
        self._accept, self._on_change = accept, on_change
        self._logits = SharedMemory.create(f"logits-{phase.value}")
        self._vocab_size = 0
        self._state = threading.Condition()
        self._asking = threading.Lock()  # held while a step waits for its answer
        self._process: WorkerProcess | None = None  # ready to work
        self._starting: WorkerProcess | None = None
        self._outage: Outage | None = Outage(f"the {phase.value} worker is starting", time.monotonic())
        self._failure: Exception | None = None  # of the first start
        self._is_closing = False
        self._thread = threading.Thread(target=self._keep, name=f"{phase.value} worker", daemon=True)

    # -- its life

    def begin(self) -> None:
        """Start the first worker; ``started`` waits for it."""
        self._thread.start()

    def started(self) -> None:
        """
        Raises:
            QuantkitError: the first worker can't work.
            WorkerFailed: it has died.
        """
        with self._state:
            self._state.wait_for(lambda: self._outage is None or self._failure is not None)
            if self._failure is not None:
                raise self._failure

    def close(self) -> None:
        """End the worker; a step that it computes is lost."""
        with self._state:
            if self._is_closing:
                return
            self._is_closing = True
            self._state.notify_all()
            for process in (self._process, self._starting):
                if process is not None:
                    process.kill()
        if self._thread.is_alive():
            self._thread.join()
        with self._asking:
            self._logits.close()

    @property
    def outage(self) -> Outage | None:
        """None while there is a worker."""
        return self._outage

    @property
    def pid(self) -> int | None:
        """Of the worker that is ready."""
        process = self._process
        return None if process is None else process.pid

    # -- steps

    def run(self, batch: Batch) -> NDArray[np.float32]:
        """Float32 ``[n, vocab]``, valid until the next call.

        Raises:
            StepLost: with its worker.
        """
        process, outage = self._process, self._outage
        if process is None:
            raise StepLost("there is no worker" if outage is None else outage.reason)
        rows = len(batch.logit_rows)
        nbytes = rows * self._vocab_size * np.dtype(np.float32).itemsize
        with self._asking:
            try:
                self._logits.resize(nbytes)
                found = process.run(batch, self.num_pages, self._step_limit_s)
                if found != rows:
                    raise process.condemn(f"gave {found} rows of logits instead of {rows}")
            except (WorkerFailed, QuantkitError) as error:
                process.kill()  # whatever it was: its pages are not to be written to any more
                self._lost(process, str(error))
                raise StepLost(str(error)) from error
            return self._logits.map(nbytes).view(np.float32).reshape(rows, self._vocab_size)

    # -- in the thread that keeps the worker

    def _keep(self) -> None:
        num_early = 0  # ends in a row, each soon after the start
        while not self._is_closing:
            self._pause(_PAUSES_S[min(num_early, len(_PAUSES_S) - 1)])
            try:
                process = self._start()
            except Exception as error:
                if self.num_starts == 0:
                    self._fail(error)
                    return
                num_early += 1
                self._go_down(f"the {self.phase.value} worker can't be started again: {error}")
                continue
            start = time.monotonic()
            self._lost(process, process.wait())
            with self._asking:  # else the next socket could get the number that a step is still polling
                process.close()
            num_early = num_early + 1 if time.monotonic() - start < _EARLY_S else 0

    def _start(self) -> WorkerProcess:
        process = WorkerProcess(self.phase, self._opening, self._num_threads, self._pool, self._logits)
        with self._state:
            self._starting = process
            if self._is_closing:  # who closed it has not seen this one
                process.kill()
        try:
            identity = process.open(self._load_limit_s)
            self._accept(self.phase, identity)
        except BaseException:
            process.close()
            raise
        finally:
            self._starting = None
        self._vocab_size = identity.facts.vocab_size
        with self._state:
            self._process, self._outage = process, None
            self.num_starts += 1
            if self._is_closing:
                process.kill()
            self._state.notify_all()
        if self.num_starts > 1:
            _log.warning("the %s worker is back, process %d", self.phase.value, process.pid)
        self._on_change()
        return process

    def _lost(self, process: WorkerProcess, reason: str) -> None:
        """The first to notice says so."""
        with self._state:
            if self._process is not process:
                return
            self._process = None
        self._go_down(reason)

    def _go_down(self, reason: str) -> None:
        with self._state:
            if self._is_closing:
                return
            since = time.monotonic() if self._outage is None else self._outage.since_s
            self._outage = Outage(reason, since)
        _log.error("%s; it is started again", reason)
        self._on_change()

    def _fail(self, error: Exception) -> None:
        with self._state:
            self._failure = error
            self._state.notify_all()

    def _pause(self, seconds: float) -> None:
        with self._state:
            self._state.wait_for(lambda: self._is_closing, seconds)
