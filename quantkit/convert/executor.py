"""Executes a plan: a list of units in a fixed order, taken by N threads, each leaving a journal line.

Units follow the order of the source's files, so that a file is read for its digest and its tensors while its pages
are warm, and (from a Hub) is needed for a short time only. Order and number of threads decide the time, never the
bytes: every output has its place before work begins, and every result is a function of its sources alone.

Threads, not processes: reading, hashing, converting and writing all release the GIL.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..artifact.journal import Entry
from ..plan.fate import Shard
from .calibrated import Calibration
from .calibrated_jobs import is_calibrated
from .ops import JobContext, run_job
from .progress import OnProgress, Stopped, Ticker
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
        states: all shards of both views and their results, in the plan's order.
        calibration: does the jobs of calibrated methods, after all others; None where there are none.
    """

    def __init__(
        self, shards: Sequence[Shard], checkpoint: Checkpoint, target: Target, sources: SourceFiles,
        budget: Budget, calibration: Calibration | None = None,
    ) -> None:  # fmt: skip
        self.checkpoint, self.target, self.sources, self._budget = checkpoint, target, sources, budget
        self.calibration = calibration
        self.states = [
            ShardState(shard, target.work, target.journal, sources.jobs_durable) for shard in shards
        ]  # fmt: skip
        self._by_tensor = {weight.weight.name: weight for weight in checkpoint.weights().values()}
        self._rank = {file: rank for rank, file in enumerate(checkpoint.files)}
        self._downloads = 0

    def restore(self) -> None:
        """Take over what the journal says is done."""
        entries = self.target.journal.entries
        self.sources.restore(entry for entry in entries if entry["kind"] == "source")
        by_shard: dict[str, list[Entry]] = {}
        for entry in entries:
            if entry["kind"] in ("jobs", "shard"):
                by_shard.setdefault(entry["shard"], []).append(entry)
        begun = [state for state in self.states if state.name in by_shard or state.path.exists()]
        with ThreadPoolExecutor(self._budget.workers) as pool:  # unfinished files are hashed again
            list(pool.map(lambda state: state.restore(by_shard.get(state.name, ())), begun))
        for state in begun:
            self.sources.jobs_durable(state.shard.jobs[i] for i in state.results)
        self._downloads = self.sources.ready()

    def run(self, on_progress: OnProgress | None) -> None:
        """Do all units that are left.

        Raises:
            KeyboardInterrupt: passed on; what is done is journalled.
            QuantkitError: the first problem of any thread; the others stop at their next tile.
        """
        units = deque(self.units())
        work = self._total_bytes()
        ticker = Ticker(work + self._downloads, on_progress)
        left = sum(self._cost(unit) for unit in units) + self._calibrated_bytes_left()
        ticker.add("weights", "resumed", work - left)
        crew = _Crew(units, lambda unit: self._do(unit, ticker), ticker)
        try:
            crew.run(self._budget.workers)
            if self.calibration is not None:
                self.calibration.run(self.states, ticker)
        except KeyboardInterrupt:
            crew.stop()
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
            if state.digest is not None:
                continue
            files = {file for job in state.shard.jobs for file in self.sources.files_of(job)}
            rank = max((self._rank[file] for file in files), default=0)
            left = [i for i in range(len(state.shard.jobs)) if i not in state.results]
            if left and all(is_calibrated(state.shard.jobs[i]) for i in left):
                continue
            left = [i for i in left if not is_calibrated(state.shard.jobs[i])]
            keyed += [(rank, number, JobsUnit(state, batch)) for batch in self._batches(state.shard, left)]
        keyed.sort(key=lambda item: item[:2])
        return [unit for _, _, unit in keyed]

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
        return self.checkpoint.tensors[shard.jobs[index].sources[0]].nbytes

    def _cost(self, unit: Unit) -> int:
        if isinstance(unit, PlaceUnit):
            return self.checkpoint.files[unit.file].nbytes
        return sum(self._job_bytes(unit.state.shard, i) for i in unit.jobs)

    def _total_bytes(self) -> int:
        files = sum(info.nbytes for info in self.checkpoint.files.values())
        jobs = sum(self._job_bytes(s.shard, i) for s in self.states for i in range(len(s.shard.jobs)))
        return files + jobs

    def _do(self, unit: Unit, ticker: Ticker) -> None:
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
            state.done(index, run_job(state.shard.jobs[index], context, writer))
        if state.digest is None:
            writer.hurry()

    def _context(self, state: ShardState, ticker: Ticker) -> JobContext:
        return JobContext(
            self.checkpoint, self._by_tensor, self._budget.tile_bytes,
            lambda count: ticker.add("weights", state.name, count),
        )  # fmt: skip


class _Crew:
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
