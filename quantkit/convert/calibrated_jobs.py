"""The jobs of calibrated methods: which weights they are of, which are left, and how their results are written.

Jobs of other methods that make INT4 are known too, since the model that calibration runs holds what they made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..artifact.canonical import round_figure
from ..checkpoint.tensor import StoredWeight
from ..plan.fate import Job, Op
from ..recipe.sections import CALIBRATED_METHODS
from ..recipe.treatment import Treatment
from .ops import write_int4
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
        for state in states:
            for index, job in enumerate(state.shard.jobs):
                if job.op is Op.TO_INT4:
                    (self._jobs if is_calibrated(job) else self._rounded)[job.sources[0]] = state, index

    def job_of(self, weight: StoredWeight) -> Job | None:
        """None: the weight is not calibrated."""
        found = self._jobs.get(weight.weight.name)
        return None if found is None else found[0].shard.jobs[found[1]]

    def is_rounded(self, weight: StoredWeight) -> bool:
        """Whether it is INT4 by a method without calibration; such a job is done before calibration begins."""
        return weight.weight.name in self._rounded

    def is_done(self, weight: StoredWeight) -> bool:
        state, index = self._jobs[weight.weight.name]
        return index in state.results

    def drop(self, layer: int) -> None:
        """Nothing of this layer is quantized any more."""
        for jobs in (self._jobs, self._rounded):
            for name in [name for name, (state, _) in jobs.items() if state.shard.layer == layer]:
                del jobs[name]

    def layers_left(self) -> list[int]:
        """Layers with a job that is not done, sorted."""
        left = {state.shard.layer for state, index in self._jobs.values() if index not in state.results}
        return sorted(layer for layer in left if layer is not None)

    def write(self, weight: StoredWeight, result: Int4Weight, facts: dict[str, Any]) -> None:
        """Write and record the result of a weight; nothing if it is done already. Any thread."""
        state, index = self._jobs[weight.weight.name]
        if index in state.results:
            return
        figures = {k: round_figure(v) if isinstance(v, float) else v for k, v in facts.items()}
        state.done(index, write_int4(state.shard.jobs[index], weight, result, state.writer(), figures))
        self._ticker.add("calibration", state.name, weight.weight.nbytes)

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
        for state in {id(s): s for s, _ in (self._jobs[w.weight.name] for w in weights)}.values():
            if state.digest is None:
                state.flush()
