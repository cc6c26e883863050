"""The scheduler of two lanes: prefill and decode steps run at the same time instead of taking turns.

Everything is as with one lane, but for the latest arrival, which makes room when a sequence must grow: it may be
in the middle of a prefill step. Then it is preempted when that step has landed, and whoever needs its pages leaves
out a step. What prefill is done with is kept here until decode takes it over, before its next step.

Between two tokens of a sequence lie no prefill steps, only the wait for a core that both workers use.
"""

from __future__ import annotations

from typing import Any

from ..engine.scheduler import Plan, Scheduler
from ..engine.sequence import Sequence, State
from ..paging import PageRef
from ..phase import Phase
from .handoff import HandOff


class SplitScheduler(Scheduler):
    """See the module and ``Scheduler``.

    Attributes:
        transit: what prefill is done with and decode has not yet taken over.
        flying: sequences of the steps that are under way.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.transit: dict[Sequence, HandOff] = {}
        self.flying: set[Sequence] = set()
        self._owing: set[Sequence] = set()  # to be preempted when they have landed
        self._has_tried = False  # to admit, the last time that it was asked for a step

    def schedule(self, lane: Phase | None = None) -> Plan | None:
        plan = super().schedule(lane)
        self._has_tried = lane is Phase.PREFILL
        if plan is not None:
            self.flying.update(run.sequence for run in plan.runs)
        return plan

    def landed(self, plan: Plan) -> None:
        """That step is over, whatever became of it."""
        sequences = {run.sequence for run in plan.runs}
        self.flying -= sequences
        for sequence in sorted(self._owing & sequences, key=lambda s: -s.arrival):
            if sequence.state is State.RUNNING:
                self._preempt(sequence)
        self._owing -= sequences

    def unservable(self) -> Sequence | None:
        """Known only to the lane that admits; and pages of requests that have ended may come back with the steps
        that are under way."""
        return super().unservable() if self._has_tried and not self.flying else None

    def remove(self, sequence: Sequence) -> list[PageRef]:
        self.transit.pop(sequence, None)
        return super().remove(sequence)

    def _make_room(self) -> bool:
        if self.running[-1] in self.flying:
            self._owing.add(self.running[-1])
            return False
        return super()._make_room()

    def _preempt(self, sequence: Sequence) -> None:
        self.transit.pop(sequence, None)
        super()._preempt(sequence)
