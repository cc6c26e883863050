"""The jobs of a conversion that another process carries out, for one that assists it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from ..checkpoint.tensor import StoredWeight
from ..plan.fate import Shard
from .calibrated_jobs import PlannedJobs, treatment_of
from .ops import quantize_rows

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..artifact.dequantize import RowReader


class AssistedJobs(PlannedJobs):
    """Jobs whose results are out of reach; those without calibration are computed again, to the same bits.

    Args:
        shards: of the plan without amendments.
        reader: of a weight of the source.
    """

    def __init__(self, shards: Iterable[Shard], reader: Callable[[StoredWeight], RowReader]) -> None:
        super().__init__(shards)
        self._reader = reader
        self._methods: dict[str, str] = {}

    def learn(self, methods: Mapping[str, str]) -> None:
        """Take over what ``CalibratedJobs.retried`` says in the other process."""
        self._methods |= methods

    def is_done(self, weight: StoredWeight) -> bool:
        return False

    def read(self, weight: StoredWeight) -> NDArray[np.float32]:
        import quantkit_kernels as kernels

        name, (rows, columns) = weight.weight.name, weight.shape
        way = treatment_of(self._rounded[name])
        made = quantize_rows(self._reader(weight), 0, rows, way.group_size, self._methods.get(name, way.method))
        return kernels.int4_to_float32(made.packed, made.scale, columns)
