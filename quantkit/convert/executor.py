"""Executes a plan: a list of units in a fixed order, taken by N threads, each leaving a journal line.

Units follow the order of the source's files, so that a file is read for its digest and its tensors while its pages
are warm, and (from a Hub) is needed for a short time only. Order and number of threads decide the time, never the
bytes: every output has its place before work begins, and every result is a function of its sources alone.

Threads, not processes: reading, hashing, converting and writing all release the GIL.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..artifact.durable import disk_errors
from ..artifact.layout import PREFILL, UNFINISHED_SUFFIX
from ..plan.fate import Op, Shard
from .calibrated import Calibration
from .calibrated_jobs import is_calibrated
from .crew import Crew
from .foreign import ForeignCalibration
from .ops import JobContext, JobResult, known_outputs
from .progress import OnProgress, Ticker
from .quality import QualityBudget, without_amended
from .shards import ShardState
from .sources import SourceFiles

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..plan.memory import Budget
    from .target import Target

BATCH_BYTES = 32 << 20  # source bytes per unit: large against scheduling, small against a shard


@dataclass(frozen=True, slots=True)
class PlaceUnit:
    """Read, digest and place one source file."""

    file: str


@dataclass(frozen=True, slots=True)
class JobsUnit:
    """Jobs of one shard (their indices); none: the file has everything and only needs finishing."""

    state: ShardState
    jobs: tuple[int, ...]


Unit = PlaceUnit | JobsUnit


class Executor:
    """One conversion: restores what earlier runs did, does the rest.

    Attributes:
        sources: the publisher's files and their digests.
        quality: holds layers back until they are judged, and amends the plan.
        states: all shards of both views and their results, in the plan's order.
        calibration: does the jobs of calibrated methods, after all others; None where there are none.
    """

    def __init__(
        self, shards: Sequence[Shard], checkpoint: Checkpoint, target: Target, sources: SourceFiles,
        budget: Budget, quality: QualityBudget, calibration: Calibration | ForeignCalibration | None = None,
    ) -> None:  # fmt: skip
        self.checkpoint, self.target, self.sources, self._budget = checkpoint, target, sources, budget
        self.quality, self.calibration = quality, calibration
        self._by_tensor = {weight.weight.name: weight for weight in checkpoint.weights().values()}
        self.states = [self._state(shard) for shard in shards]
        self._ticker = Ticker(0, None)
        self._crew: Crew[Unit] | None = None
        self._rank = {file: rank for rank, file in enumerate(checkpoint.files)}
        self._downloads = 0

    def restore(self) -> None:
        """Take over what the journal says is done."""
        entries = self.target.journal.entries
        self.sources.restore(entry for entry in entries if entry["kind"] == "source")
        by_shard, removed = without_amended(entries)
        for name in removed - {state.name for state in self.states}:
            path = self.target.work / f"{name}{UNFINISHED_SUFFIX}"
            with disk_errors(path):
                path.unlink(missing_ok=True)
        begun = [state for state in self.states if state.name in by_shard or state.path.exists()]
        with ThreadPoolExecutor(self._budget.workers) as pool:  # unfinished files are hashed again
            list(pool.map(lambda state: state.restore(by_shard.get(state.name, ())), begun))
        for state in begun:
            state.restored()
        self._downloads = self.sources.ready()

    def run(self, on_progress: OnProgress | None) -> None:
        """Do all units that are left.

        Raises:
            KeyboardInterrupt: passed on; what is done is journalled.
            QuantkitError: the first problem of any thread; the others stop at their next tile.
        """
        try:
            for layer in self.quality.open_layers():
                if self.quality.is_known(layer, self._results(layer)):
                    self.settle(layer)
            units = self.units()
            work = self._total_bytes()
            self._ticker = ticker = Ticker(work + self._downloads, on_progress)
            left = sum(self._cost(unit) for unit in units) + self._calibrated_bytes_left()
            ticker.add("weights", "resumed" if work > left else "", work - left)
            self._work(units)
            if self.calibration is not None:
                self.calibration.run(self.states, ticker, self.settle)
                self._work(self.units())  # layers that were planned anew meanwhile
        except KeyboardInterrupt:
            if self._crew is not None:
                self._crew.stop()
            self._flush_all()
            raise
        except BaseException:
            # Keep what is done; the first problem is what the user needs to hear of.
            with contextlib.suppress(Exception):
                self._flush_all()
            raise
        finally:
            for state in self.states:
                state.close()

    def settle(self, layer: int) -> bool:
        """Judge a layer whose limited weights are all done and on which no thread is at work.

        Any thread; what was judged is not judged again, and a layer without limits never.

        Returns:
            Whether the layer is planned anew.

        Raises:
            GateFailed: a weight is over its limit, and the recipe keeps no layer or no layer is left.
        """
        if not self.quality.claim(layer):
            return False
        states = self._files_of(layer)
        for state in states:
            if state.digest is None:
                state.flush()  # a run after this one must come to the same verdict without computing
        amendment = self.quality.judge(layer, self._results(layer))
        if amendment is None:
            for state in states:
                state.release()
        else:
            self._replace(states, self.quality.amend(amendment, [state.name for state in states]))
        return amendment is not None

    def _replace(self, before: list[ShardState], shards: Iterable[Shard]) -> None:
        after = [self._state(shard) for shard in shards]
        self.sources.replace_jobs(
            (job for state in before for job in state.shard.jobs), (job for s in after for job in s.shard.jobs)
        )
        for state in before:
            state.remove()
        place = self.states.index(before[0])
        rest = [state for state in self.states if state not in before]
        self.states = [*rest[:place], *after, *rest[place:]]
        units = [unit for state in after for unit in self._units_of(state)]
        self._ticker.grow(sum(self._cost(unit) for unit in units))
        if self._crew is not None:
            self._crew.add(units)

    def _state(self, shard: Shard) -> ShardState:
        return ShardState(
            shard, self.target.work, self.target.journal, self.sources.jobs_durable,
            held=self.quality.holds(shard), known=lambda: known_outputs(shard.jobs, self._by_tensor),
        )  # fmt: skip

    def _files_of(self, layer: int) -> list[ShardState]:
        """The files that an amendment of a layer replaces."""
        return [s for s in self.states if s.shard.layer == layer and s.shard.view != PREFILL]

    def _results(self, layer: int) -> dict[str, JobResult]:
        """Of weights and copies, by first source tensor."""
        return {
            job.sources[0]: result
            for state in self._files_of(layer)
            for index, result in state.results.items()
            if (job := state.shard.jobs[index]).op is not Op.FOLD
        }

    def _flush_all(self) -> None:
        for state in self.states:
            if state.digest is None:
                state.flush()

    def units(self) -> list[Unit]:
        """What is left to do, each shard right after the last source file that it needs."""
        keyed: list[tuple[int, int, Unit]] = [
            (rank, -1, PlaceUnit(file)) for file, rank in self._rank.items() if file not in self.sources.placed
        ]
        for number, state in enumerate(self.states):
            files = {file for job in state.shard.jobs for file in self.sources.files_of(job)}
            rank = max((self._rank[file] for file in files), default=0)
            keyed += [(rank, number, unit) for unit in self._units_of(state)]
        keyed.sort(key=lambda item: item[:2])
        return [unit for _, _, unit in keyed]

    def _units_of(self, state: ShardState) -> list[JobsUnit]:
        """What is left of a file but for calibrated jobs; one of no jobs only finishes it."""
        if state.digest is not None or (state.is_complete and state.is_held):
            return []
        left = [i for i in range(len(state.shard.jobs)) if i not in state.results]
        if left and all(is_calibrated(state.shard.jobs[i]) for i in left):
            return []
        left = [i for i in left if not is_calibrated(state.shard.jobs[i])]
        return [JobsUnit(state, batch) for batch in self._batches(state.shard, left)]

    def _batches(self, shard: Shard, left: Iterable[int]) -> list[tuple[int, ...]]:
        batches: list[tuple[int, ...]] = []
        batch: list[int] = []
        size = 0
        for index in left:
            batch.append(index)
            size += self._job_bytes(shard, index)
            if size >= BATCH_BYTES:
                batches.append(tuple(batch))
                batch, size = [], 0
        if batch or not batches:
            batches.append(tuple(batch))
        return batches

    def _calibrated_bytes_left(self) -> int:
        return sum(
            self._job_bytes(state.shard, index)
            for state in self.states
            for index, job in enumerate(state.shard.jobs)
            if is_calibrated(job) and index not in state.results
        )

    def _job_bytes(self, shard: Shard, index: int) -> int:
        if shard.jobs[index].op is Op.FOLD:
            return 0  # a by-product; its weights are counted where they are quantized
        return self.checkpoint.tensors[shard.jobs[index].sources[0]].nbytes

    def _cost(self, unit: Unit) -> int:
        if isinstance(unit, PlaceUnit):
            return self.checkpoint.files[unit.file].nbytes
        return sum(self._job_bytes(unit.state.shard, i) for i in unit.jobs)

    def _total_bytes(self) -> int:
        files = sum(info.nbytes for info in self.checkpoint.files.values())
        jobs = sum(self._job_bytes(s.shard, i) for s in self.states for i in range(len(s.shard.jobs)))
        return files + jobs

    def _work(self, units: list[Unit]) -> None:
        """Do units, and those of layers that are planned anew meanwhile."""
        self._crew = Crew(deque(units), self._do, self._ticker)
        self._crew.run(self._budget.workers)
        self._crew = None

    def _do(self, unit: Unit) -> None:
        ticker = self._ticker
        ticker.check()
        if isinstance(unit, PlaceUnit):
            self.sources.place(unit.file, ticker)
            return
        state = unit.state
        if not unit.jobs:
            state.finish()
            return
        for file in sorted({f for i in unit.jobs for f in self.sources.files_of(state.shard.jobs[i])}):
            self.sources.fetch(file, ticker)
        context = self._context(state, ticker)
        writer = state.writer()
        for index in unit.jobs:
            state.done(index, self.quality.run(state.shard.jobs[index], context, writer))
        if state.digest is None:
            writer.hurry()
        layer = state.shard.layer
        if state.is_held and layer is not None and all(s.is_complete for s in self._files_of(layer)):
            self.settle(layer)

    def _context(self, state: ShardState, ticker: Ticker) -> JobContext:
        return JobContext(
            self.checkpoint, self._by_tensor, self._budget.tile_bytes,
            lambda count: ticker.add("weights", state.name, count),
        )  # fmt: skip
