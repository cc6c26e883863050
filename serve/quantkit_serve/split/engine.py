"""The engine over two workers: a lane per phase, and the hand-off between them.

Scheduling, paging, tag checks, sampling and text are ``engine.Engine``'s; a thread per lane calls ``step``, and
while it waits for its worker the other one has the lock. So one step of each phase is under way at a time, the
pages of each in flight by a ticket of its own.

A worker that dies takes the step with it that it was computing, and so the requests of that step; the others wait
for the next worker, for ``return_limit_s`` seconds, while the other lane goes on.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from ..batch import StepLost
from ..config import EngineConfig
from ..engine.choosing import Chosen
from ..engine.engine import Engine, Flight
from ..engine.sequence import Sequence, State
from ..engine.vocabulary import Vocabulary
from ..paging import Canary, Seal
from ..phase import Phase
from ..refusal import Unavailable
from ..request import Output, Request
from ..service import Figures
from .config import SplitConfig
from .handoff import HandOffs
from .pair import Pair
from .remote_runner import Outage
from .scheduler import SplitScheduler


class SplitEngine(Engine):
    """See the module and ``Engine``.

    Args:
        pair: of workers; closed with the engine, and if there can be none.
        config: see there.
        split: limits, and whether there is a canary.
        vocabulary: of the tokenizer.
        more: as ``Engine``.
    """

    lanes = (Phase.PREFILL, Phase.DECODE)
    scheduler_type = SplitScheduler
    scheduler: SplitScheduler

    def __init__(
        self, pair: Pair, config: EngineConfig, split: SplitConfig, vocabulary: Vocabulary, **more: Any
    ) -> None:
        self._pair, self._split = pair, split
        try:
            super().__init__(pair, config, vocabulary, **more)
        except BaseException:
            pair.close()
            raise
        self.handoffs = HandOffs(self.pool, Canary([pair.memory]) if split.has_canary else None)
        self._seals: dict[Sequence, tuple[Seal, ...]] = {}  # of the prefill step that lands next
        self._num_changes = 0
        self._stalled_at: dict[Phase | None, int] = {}  # lane -> the change after which it had nothing to do
        pair.on_change = self._wake

    # -- requests

    def check(self, request: Request) -> None:
        """
        Raises:
            Refused: as ``Engine.check``; ``Unavailable``: a worker is down, and has been for too long.
        """
        for lane in Phase:
            if (reason := self._given_up(lane)) is not None:
                raise Unavailable(reason)
        super().check(request)

    def add(self, request: Request, *more: Any, **named: Any) -> None:
        super().add(request, *more, **named)
        self._wake()

    def outage(self) -> str | None:
        found = [outage.reason for phase in Phase if (outage := self._outage(phase)) is not None]
        return "; ".join(found) or None

    def close(self) -> None:
        super().close()
        self._pair.close()

    def figures(self) -> Figures:
        with self.lock:
            found = super().figures()
            return replace(
                found,
                kv_tag_checks=found.kv_tag_checks + self.handoffs.num_checks,
                kv_tag_mismatches=found.kv_tag_mismatches + self.handoffs.num_mismatches,
                handoff_seconds=self.handoffs.seconds,
                worker_restarts={
                    phase.value: max(runner.num_starts - 1, 0) for phase, runner in self._pair.runners.items()
                },
            )

    # -- lanes

    def is_due(self, lane: Phase | None) -> bool:
        return self.has_work and self._stalled_at.get(lane) != self._num_changes

    def _wake(self) -> None:
        """Something has changed that may give a lane something to do."""
        with self.changed:
            self._num_changes += 1
            self.changed.notify_all()

    def _launch(self, outputs: list[Output], lane: Phase | None) -> Flight | None:
        seen, preempted = self._num_changes, self.scheduler.num_preemptions
        flight = None
        if (reason := self._given_up(lane)) is not None:
            outputs += [self._fail(sequence, reason) for sequence in self._waiting_for(lane)]
        elif self._outage(lane) is None:
            if lane is Phase.DECODE:
                outputs += self._take_over()
            flight = super()._launch(outputs, lane)
        if flight is None:
            self._stalled_at[lane] = seen
        if self.scheduler.num_preemptions > preempted:
            self._wake()
        return flight

    def _compute(self, flight: Flight) -> list[Chosen]:
        """Seals what prefill is done with before it lands: its pages are in flight, so nobody gets them meanwhile,
        and the lock is free. Only this lane's thread uses ``_seals``."""
        chosen = super()._compute(flight)
        if flight.plan.phase is Phase.PREFILL:
            runs = flight.plan.runs
            done = [r.sequence for r in runs if r.sequence.num_computed + r.count >= r.sequence.num_prompt]
            self._seals = {sequence: self.handoffs.seal(sequence) for sequence in done}
        return chosen

    def _land(self, flight: Flight, chosen: list[Chosen]) -> list[Output]:
        outputs = super()._land(flight, chosen)
        for run in flight.plan.runs:
            sequence = run.sequence
            if flight.plan.phase is not sequence.phase and sequence.state is State.RUNNING:
                self.scheduler.transit[sequence] = self.handoffs.write(sequence, self._seals.pop(sequence))
        self.scheduler.landed(flight.plan)
        self._wake()
        return outputs

    def _lose(self, flight: Flight, lost: StepLost) -> list[Output]:
        outputs = super()._lose(flight, lost)
        self.scheduler.landed(flight.plan)
        self._wake()
        return outputs

    def _end(self, sequence: Sequence, *more: Any, **named: Any) -> Output:
        output = super()._end(sequence, *more, **named)
        self._wake()
        return output

    # -- hand-off and outage

    def _take_over(self) -> list[Output]:
        """Decode takes what prefill is done with; those fail whose pages are not what they were."""
        outputs = []
        for sequence, message in list(self.scheduler.transit.items()):
            del self.scheduler.transit[sequence]
            if (error := self.handoffs.accept(message, sequence)) is not None:
                outputs.append(self._fail(sequence, f"hand-off check failed: {error}"))
        return outputs

    def _outage(self, lane: Phase | None) -> Outage | None:
        return None if lane is None else self._pair.runners[lane].outage

    def _given_up(self, lane: Phase | None) -> str | None:
        """Why nobody waits for the lane's worker any more."""
        outage, limit_s = self._outage(lane), self._split.return_limit_s
        if outage is None or time.monotonic() - outage.since_s < limit_s:
            return None
        return f"{outage.reason}; it has not been back for {limit_s:g} s"

    def _waiting_for(self, lane: Phase | None) -> list[Sequence]:
        """Requests that can't go on without the lane's worker; all that are queued will need either."""
        running = [s for s in self.scheduler.running if s.phase is lane]
        return [*running, *self.scheduler.waiting]
