"""A fault that is injected into a running engine, for tests (``paging.faults``): once, and never in silence."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..paging import Fault, PagePool, Scene, Victim
from .scheduler import Plan

_log = logging.getLogger(__name__)


class Injection:
    """Strikes at the first step at which there is something to break, and says what it broke.

    Args:
        fault: see there.
        scribble: overwrites a page, for the faults that do.
    """

    def __init__(self, fault: Fault, scribble: Callable[[int], None]) -> None:
        self._fault: Fault | None = fault
        self._scribble = scribble

    @property
    def has_struck(self) -> bool:
        return self._fault is None

    def before(self, plan: Plan, pool: PagePool) -> None:
        """A step is about to be checked."""
        if self._fault is None:
            return
        victims = [Victim(run.sequence.request_id, run.sequence.table, run.sequence.expected) for run in plan.runs]
        struck = self._fault.strike(Scene(pool, victims, self._scribble))
        if struck is not None:
            _log.warning("injected fault: %s", struck)
            self._fault = None

    def end(self) -> None:
        """No step follows; a fault that has never struck has shown nothing. More calls say nothing more."""
        if self._fault is not None:
            _log.warning(
                "injected fault: %s has never struck, there was nothing to break", type(self._fault).__name__
            )
            self._fault = None
