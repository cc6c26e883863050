"""Calibrated jobs of linears outside the routed experts: which there are, and those of one layer carried out."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ..calibration.expert import ExpertSettings, facts
from ..calibration.linear import Wanted, calibrate_linears
from ..models.role import Role
from .calibrated_jobs import treatment_of

if TYPE_CHECKING:
    from ..calibration.linears import Linears
    from ..calibration.skeleton import Skeleton
    from ..checkpoint import Checkpoint
    from ..checkpoint.tensor import StoredWeight
    from ..models.classify import Classifier
    from .calibrated_jobs import PlannedJobs
    from .progress import Ticker

_NEVER_STARVED = ExpertSettings(min_tokens=0)


class LinearJobs:
    """The calibrated linears of a conversion, by layer.

    Args:
        checkpoint, classifier: the source.
        jobs: the calibrated jobs.
        skeleton: knows how transformers calls the linears.

    Raises:
        UnsupportedError: transformers has no linear of its own for one of them.
    """

    def __init__(
        self, checkpoint: Checkpoint, classifier: Classifier, jobs: PlannedJobs, skeleton: Skeleton
    ) -> None:
        self._jobs = jobs
        self._found: dict[int, dict[str, StoredWeight]] = {}
        for weight in checkpoint.weights().values():
            role = classifier.role_of(weight.weight.name)
            if role.role is not Role.ROUTED_EXPERT and role.layer is not None and jobs.job_of(weight) is not None:
                self._found.setdefault(role.layer, {})[skeleton.linear(role.layer, weight)] = weight

    def run(self, layer: int, linears: Linears, settings: ExpertSettings, ticker: Ticker) -> None:
        """Calibrate and write those of a layer, which is loaded; each is durable when it is done.

        Raises:
            as ``calibrate_linears``.
        """
        stored = self._found.get(layer, {})
        wanted = [one for path, weight in stored.items() if (one := self._wanted(path, weight))]
        for one, result in calibrate_linears(linears, wanted, settings):
            ticker.check()
            if self._jobs.written is not None:
                self._jobs.written.write(stored[one.path], result.weight, facts(result, _NEVER_STARVED))
                self._jobs.written.flush([stored[one.path]])

    def _wanted(self, path: str, weight: StoredWeight) -> Wanted | None:
        job = self._jobs.job_of(weight)
        if job is None:  # its layer was amended
            return None
        finished = partial(self._jobs.read, weight) if self._jobs.is_done(weight) else None
        return Wanted(path, weight.module, treatment_of(job), finished)
