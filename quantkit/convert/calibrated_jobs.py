"""The jobs of calibrated methods: which weights they are of, which are left, and how their results are written.

Jobs of other methods that make INT4 are known too, since the model that calibration runs holds what they made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..artifact.canonical import round_figure
from ..checkpoint.tensor import StoredWeight
from ..plan.fate import Job, Op, Shard
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


class PlannedJobs(ABC):
    """The jobs of a plan that make INT4, and access to what they made.

    Args:
        shards: of both views.

    Attributes:
        written: the same where results are written; None in processes that only assist.
    """

    written: CalibratedJobs | None = None

    def __init__(self, shards: Iterable[Shard]) -> None:
        self._planned: dict[str, Job] = {}  # by the first tensor of the weight
        self._rounded: dict[str, Job] = {}  # of methods without calibration
        self._layers: dict[str, int | None] = {}
        for shard in shards:
            for job in shard.jobs:
                if job.op is Op.TO_INT4:
                    (self._planned if is_calibrated(job) else self._rounded)[job.sources[0]] = job
                    self._layers[job.sources[0]] = shard.layer

    def job_of(self, weight: StoredWeight) -> Job | None:
        """None: the weight is not calibrated."""
        return self._planned.get(weight.weight.name)

    def is_rounded(self, weight: StoredWeight) -> bool:
        """Whether it is INT4 by a method without calibration; such a job is done before calibration begins."""
        return weight.weight.name in self._rounded

    @abstractmethod
    def is_done(self, weight: StoredWeight) -> bool:
        """Whether ``read`` gives what this calibrated weight became."""

    @abstractmethod
    def read(self, weight: StoredWeight) -> NDArray[np.float32]:
        """What a weight became whose job is done, by any method: the numbers of its INT4, float32 ``[O, I]``."""

    @property
    def layers(self) -> set[int]:
        """Layers with a weight that is INT4."""
        return {layer for layer in self._layers.values() if layer is not None}

    def last_layer(self) -> int:
        """The last one with a weight that is calibrated."""
        return max(layer for name in self._planned if (layer := self._layers[name]) is not None)

    def drop(self, layer: int) -> None:
        """Nothing of this layer is quantized any more."""
        for name in [name for name, other in self._layers.items() if other == layer]:
            for known in (self._planned, self._rounded, self._layers):
                known.pop(name, None)


class CalibratedJobs(PlannedJobs):
    """The calibrated jobs among the shards of a conversion, and their results.

    Args:
        states: of all shards, after ``restore``.
        ticker: told the bytes of source that are done.
    """

    def __init__(self, states: Sequence[ShardState], ticker: Ticker) -> None:
        super().__init__(state.shard for state in states)
        self.written = self
        self._ticker = ticker
        self._jobs: dict[str, tuple[ShardState, int]] = {}
        self._folds: dict[str, tuple[ShardState, int]] = {}  # by the first tensor of up
        for state in states:
            for index, job in enumerate(state.shard.jobs):
                if job.op in (Op.TO_INT4, Op.FOLD):
                    (self._jobs if job.op is Op.TO_INT4 else self._folds)[job.sources[0]] = state, index

    def is_done(self, weight: StoredWeight) -> bool:
        """Whether it is written, with the scale that was moved out of it, if one was."""
        return all(index in state.results for state, index in self._jobs_of(weight.weight.name))

    def _jobs_of(self, name: str) -> Iterator[tuple[ShardState, int]]:
        yield self._jobs[name]
        if name in self._folds:
            yield self._folds[name]

    def retried(self, layer: int) -> dict[str, str]:
        """Methods of rounded weights of a layer, where these are not the plan's (retries under a budget)."""
        found = ((name, *self._jobs[name]) for name in self._rounded if self._layers[name] == layer)
        return {n: method for n, state, i in found if (method := state.results[i].method) is not None}

    def layers_left(self) -> list[int]:
        """Layers with a job that is not done, sorted."""
        jobs = (one for name in self._planned for one in self._jobs_of(name))
        left = {state.shard.layer for state, index in jobs if index not in state.results}
        return sorted(layer for layer in left if layer is not None)

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
        import numpy as np

        import quantkit_kernels as kernels

        state, index = self._jobs[weight.weight.name]
        rows, columns = weight.shape
        data = {t.name.rpartition(".")[2]: state.read(t) for t in state.shard.jobs[index].outputs}
        packed = np.frombuffer(data["weight_packed"], "<i4").reshape(rows, -1)
        scale = np.frombuffer(data["weight_scale"], "<u2").reshape(rows, -1)
        return kernels.int4_to_float32(packed, scale, columns)

    def flush(self, weights: Iterable[StoredWeight]) -> None:
        """Make durable what is written of these weights. Any thread."""
        for state in {id(s): s for w in weights for s, _ in self._jobs_of(w.weight.name)}.values():
            if state.digest is None:
                state.flush()
