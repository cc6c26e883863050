"""The processes of a run for as long as they work together: how they begin, and how they end as one.

An error of one process is everybody's: it is posted in the store of the rendezvous before the connections are
closed, the others find them closed and read it there. One process says it (0 if that is alive), all exit with its
code. A process that was killed posts nothing; the first to notice posts that it is gone.
"""

from __future__ import annotations

import gc
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from quantkit.launch import process_of_run

from .processes import Lost, Processes
from .ranks import ALONE, Ranks


@contextmanager
def together() -> Iterator[Ranks]:
    """The processes of this run for the length of the block: an error in one ends it in all.

    In a process alone it does nothing. At the end of the block processes wait for process 0's end of it.

    Raises:
        SaidElsewhere: the run failed, and another process says why.
        EnvironmentProblem: another process ended without a word.
    """
    rank, size = process_of_run()
    if size == 1:
        yield ALONE
        return
    termination = _Termination()
    ranks = None
    try:
        ranks = Processes(rank, size)
        yield ranks
        ranks.finish()
    except BaseException as error:
        termination.ignore()
        if ranks is None:
            raise
        own = None if isinstance(error, Lost) or termination.came else error
        _release_frames(error)
        found = ranks.failed(own, is_told=termination.came)
        if found is error:
            raise
        raise found from None
    ranks.leave()
    termination.restore()


def _release_frames(error: BaseException) -> None:
    """Forget the variables of functions that an error, and those behind it, came through: they may refer to the
    group of processes, which then stays connected in spite of ``leave``, and the others wait for this one.
    """
    seen: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        one = chain.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            chain += [one.__cause__, one.__context__]
    gc.collect()  # what refers to the group in a cycle


class _Termination:
    """SIGTERM ends this process as Ctrl-C does: launchers send it when another process has ended."""

    def __init__(self) -> None:
        self.came = False
        self._is_main = threading.current_thread() is threading.main_thread()
        self._before = signal.signal(signal.SIGTERM, self._end) if self._is_main else None

    def _end(self, _number: int, _frame: Any) -> None:
        self.came = True
        self.ignore()
        raise KeyboardInterrupt

    def ignore(self) -> None:
        """This process is about to say why it ends, and to exit with its code."""
        if self._is_main:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def restore(self) -> None:
        if self._is_main:
            signal.signal(signal.SIGTERM, self._before)
