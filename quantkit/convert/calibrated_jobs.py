"""The jobs of calibrated methods: which weights they are of, which are left, and how their results are written.

Jobs of other methods that make INT4 are known too, since the model that calibration runs holds what they made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..artifact.canonical import round_figure
from ..checkpoint.tensor import StoredWeight
from ..plan.fate import Job, Op
from ..recipe.sections import CALIBRATED_METHODS
from ..recipe.treatment import Treatment
from .ops import JobResult, write_int4
from .progress import Ticker
from .shards import ShardState

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quantkit_kernels import Int4Weight


def is_calibrated(job: Job) -> bool:
    return job.method in CALIBRATED_METHODS


def treatment_of(job: Job) -> Treatment:
    """Method and group size of a job that makes INT4."""
    if job.method is None or job.group_size is None:
        raise RuntimeError(f"{job.sources[0]}: no method or group size")
    return Treatment(job.method, job.group_size)


class CalibratedJobs:
    """The calibrated jobs among the shards of a conversion.

    Args:
        states: of all shards, after ``restore``.
        ticker: told the bytes of source that are done.
    """

    def __init__(self, states: Sequence[ShardState], ticker: Ticker) -> None:
        self._ticker = ticker
        self._jobs: dict[str, tuple[ShardState, int]] = {}  # by the first tensor of the weight
        self._rounded: dict[str, tuple[ShardState, int]] = {}  # of methods without calibration
        self._folds: dict[str, tuple[ShardState, int]] = {}  # by the first tensor of up
        for state in states:
            for index, job in enumerate(state.shard.jobs):
                if job.op is Op.TO_INT4:
                    (self._jobs if is_calibrated(job) else self._rounded)[job.sources[0]] = state, index
                elif job.op is Op.FOLD:
                    self._folds[job.sources[0]] = state, index

    def job_of(self, weight: StoredWeight) -> Job | None:
        """None: the weight is not calibrated."""
        found = self._jobs.get(weight.weight.name)
        return None if found is None else found[0].shard.jobs[found[1]]

    def is_rounded(self, weight: StoredWeight) -> bool:
        """Whether it is INT4 by a method without calibration; such a job is done before calibration begins."""
        return weight.weight.name in self._rounded

    def is_done(self, weight: StoredWeight) -> bool:
        """Whether it is written, with the scale that was moved out of it, if one was."""
        return all(index in state.results for state, index in self._jobs_of(weight))

    def _jobs_of(self, weight: StoredWeight) -> Iterator[tuple[ShardState, int]]:
        name = weight.weight.name
        yield self._jobs[name]
        if name in self._folds:
            yield self._folds[name]

    def drop(self, layer: int) -> None:
        """Nothing of this layer is quantized any more."""
        for jobs in (self._jobs, self._rounded, self._folds):
            for name in [name for name, (state, _) in jobs.items() if state.shard.layer == layer]:
                del jobs[name]

    def layers_left(self) -> list[int]:
        """Layers with a job that is not done, sorted."""
        jobs = chain(self._jobs.values(), self._folds.values())
        left = {state.shard.layer for state, index in jobs if index not in state.results}
        return sorted(layer for layer in left if layer is not None)

    def last_layer(self) -> int:
        """The last one with a job."""
        return max(state.shard.layer for state, _ in self._jobs.values() if state.shard.layer is not None)

    def write(
        self, weight: StoredWeight, result: Int4Weight, facts: dict[str, Any],
        fold: NDArray[np.float32] | None = None,
    ) -> None:  # fmt: skip
        """Write and record the result of a weight; nothing if it is done already. Any thread.

        Args:
            fold: the scale ``[M]`` that was moved from up to down before; it is written with up.
        """
        name = weight.weight.name
        if name in self._folds:
            self._write_fold(*self._folds[name], fold)
        state, index = self._jobs[name]
        if index in state.results:
            return
        figures = {k: round_figure(v) if isinstance(v, float) else v for k, v in facts.items()}
        state.done(index, write_int4(state.shard.jobs[index], weight, result, state.writer(), figures))
        self._ticker.add("calibration", state.name, weight.weight.nbytes)

    @staticmethod
    def _write_fold(state: ShardState, index: int, fold: NDArray[np.float32] | None) -> None:
        import numpy as np

        if index in state.results:
            return
        (output,) = state.shard.jobs[index].outputs
        if fold is None:
            raise RuntimeError(f"{output.name}: no fold was made")
        sink = state.writer().sink(output.name)
        sink.write(np.ascontiguousarray(fold, "<f4").view(np.uint8).data)
        state.done(index, JobResult({output.name: sink.digest()}))

    def read(self, weight: StoredWeight) -> NDArray[np.float32]:
        """What a weight became whose job is done, by any method: the numbers of its INT4, float32 ``[O, I]``."""
        import numpy as np

        import quantkit_kernels as kernels

        name = weight.weight.name
        state, index = self._jobs.get(name) or self._rounded[name]
        rows, columns = weight.shape
        data = {t.name.rpartition(".")[2]: state.read(t) for t in state.shard.jobs[index].outputs}
        packed = np.frombuffer(data["weight_packed"], "<i4").reshape(rows, -1)
        scale = np.frombuffer(data["weight_scale"], "<u2").reshape(rows, -1)
        return kernels.int4_to_float32(packed, scale, columns)

    def flush(self, weights: Iterable[StoredWeight]) -> None:
        """Make durable what is written of these weights. Any thread."""
        for state in {id(s): s for w in weights for s, _ in self._jobs_of(w)}.values():
            if state.digest is None:
                state.flush()
