"""The calibrated part of a conversion: layers in order, the experts of one layer in parallel.

It comes after everything else, because it needs the source's files in place and each layer needs the one before.
Results go the way of all jobs: into the shard, into the journal, into ``tensors.jsonl``. Each expert is durable
when it is done, and when those of a layer are, so is the input of the next one (``calibration_state.py``). A run
that is killed repeats the forward pass of the layer it was at, but no expert that was done: these compute with
their INT4 weights read back. If the state of the layer is lost or damaged, the forward pass begins again at the
first layer in the same way.

Every task computes with one torch thread, so workers change time and memory, never a bit. The bits do depend on
the machine: torch chooses its matrix products by the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING

from ..artifact.dequantize import RowReader
from ..calibration.expert import DOWN, Expert, ExpertSettings, calibrate_expert, facts
from ..calibration.experts import Inputs, Routed
from ..calibration.gptq import GptqSettings
from ..calibration.linears import Linears
from ..calibration.memory import Shape, choose_workers, largest_layer, largest_stage
from ..calibration.skeleton import Skeleton
from ..calibration.stream import Stream, Workers, batch_samples
from ..calibration.weights import WeightReader, routed_experts
from ..checkpoint.tensor import Storage, StoredWeight
from ..errors import SourceError
from ..models.classify import find_family
from ..models.config import text_config
from ..models.role import Role
from ..plan.memory import resident_bytes
from .calibrated_jobs import CalibratedJobs, is_calibrated, treatment_of
from .calibrated_linears import LinearJobs
from .calibration_state import FOLDER, SpilledArrays, load_state, save_state
from .ops import relative_error
from .progress import Ticker
from .shards import ShardState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from quantkit_kernels import Int4Weight

    from ..calibration.retry import Over
    from ..calibration.samples import CalibrationSet
    from ..checkpoint import Checkpoint
    from ..plan import Plan
    from .target import Target


Settle = Callable[[int], bool]


class Calibration:
    """All calibrated jobs of one conversion.

    Args:
        workers: experts at once, if ``max_memory`` allows.
        max_memory: as given to ``convert``.

    Raises:
        EnvironmentProblem: the memory is not enough for one expert, or transformers is not installed.
    """

    def __init__(
        self, plan: Plan, checkpoint: Checkpoint, target: Target, samples: CalibrationSet, workers: int,
        max_memory: int | None,
    ) -> None:  # fmt: skip
        self.samples = samples
        self._checkpoint, self._target = checkpoint, target
        self.settings = settings_of(plan)
        budget = plan.recipe.budget
        self.limits = plan.limits if budget is not None and budget.retries else {}
        self._classifier = find_family(checkpoint.config, checkpoint.tensors, override=plan.recipe.family)
        self.experts = routed_experts(checkpoint, self._classifier)
        self._budget = choose_workers(workers, max_memory, _resident(max_memory), self._shape(plan))

    def space_needed(self) -> int:
        """Bytes on the target's disk while it runs: two states of hidden values, and arrays that are mapped."""
        width = text_config(self._checkpoint.config).get("hidden_size", 0)
        return 5 * 4 * self.samples.token_ids.size * width if isinstance(width, int) else 0

    def run(self, states: Sequence[ShardState], ticker: Ticker, settle: Settle) -> None:
        """Do what is left.

        Args:
            settle: judges a layer when its experts are done; True: the plan was amended, and nothing of the layer
                is quantized.

        Raises:
            SourceError: activations that are not finite, weights that are missing; the layer and expert are named.
            UnsupportedError: transformers has no such model.
            EnvironmentProblem: the disk refuses; resumable.
        """
        jobs = CalibratedJobs(states, ticker)
        left = jobs.layers_left()
        if not left:
            return
        folder = self._target.work / FOLDER
        folder.mkdir(exist_ok=True)
        predictions = max(0, jobs.last_layer() + 1 - (self._classifier.num_layers or 0))
        skeleton = Skeleton(self._checkpoint, self._classifier, self._reader(jobs), predictions)
        linears = LinearJobs(self._checkpoint, self._classifier, jobs, skeleton)
        workers = Workers(self._budget.workers)
        try:
            arrays = SpilledArrays(folder, self._budget.array_bytes)
            stream = Stream(skeleton, self.samples.token_ids, workers, arrays)
            if not self._resumes(stream, left[0]):
                stream.embed()
            while stream.position <= left[-1]:
                layer = stream.position
                stream.forward(_Layer(self, layer, skeleton, jobs, linears, ticker, settle))
                self._target.journal.append(save_state(stream, folder))
        finally:
            workers.close()

    def _resumes(self, stream: Stream, first_left: int) -> bool:
        """Whether the stream stands at the journalled layer; not if a layer before it lost something."""
        entries = [e for e in self._target.journal.entries if e["kind"] == "calibration"]
        return any(
            load_state(stream, self._target.work / FOLDER, entry)
            for entry in reversed(entries[-2:])
            if entry["layer"] < first_left
        )

    def read(self, weight: StoredWeight, start: int, stop: int) -> NDArray[np.float32]:
        import numpy as np

        array: NDArray[np.float32] = RowReader(self._checkpoint, weight).float32(start, stop)
        if weight.storage is Storage.PLAIN and not np.isfinite(array).all():
            raise SourceError("NaN or infinity", where=weight.weight.place, hint="Download the source again.")
        return array

    def _reader(self, jobs: CalibratedJobs) -> WeightReader:
        """Weights outside the experts, as the layers that are calibrated see them (``propagate``)."""
        if self.settings.propagate == "original":
            return self.read

        def read(weight: StoredWeight, start: int, stop: int) -> NDArray[np.float32]:
            return jobs.read(weight)[start:stop] if jobs.is_rounded(weight) else self.read(weight, start, stop)

        return read

    def _shape(self, plan: Plan) -> Shape:
        text = text_config(self._checkpoint.config)
        heads = text.get("num_attention_heads")
        one = next(iter(self.experts.values()))
        jobs = {job.sources[0] for shard in plan.decode for job in shard.jobs if is_calibrated(job)}
        others = [
            (role.layer, weight)
            for weight in self._checkpoint.weights().values()
            if (role := self._classifier.role_of(weight.weight.name)).role not in (Role.ROUTED_EXPERT, Role.MTP)
        ]
        chosen = [(layer, weight) for layer, weight in others if weight.weight.name in jobs]
        layer_weights = largest_layer((layer, prod(weight.shape)) for layer, weight in others)
        if "original" in (self.settings.propagate, self.settings.down_inputs):  # kept beside the new ones
            layer_weights += largest_layer((layer, prod(weight.shape)) for layer, weight in chosen)
        columns, stage = largest_stage((weight.module, weight.shape) for _, weight in chosen)
        samples, length = self.samples.token_ids.shape
        return Shape(
            hidden=one[DOWN].shape[0], inner=one[DOWN].shape[1], heads=heads if isinstance(heads, int) else 1,
            layer_weights=layer_weights, batch=min(samples, batch_samples(length)), length=length,
            columns=columns, stage=stage,
        )  # fmt: skip


class _Layer:
    """One layer: calibrated where there is a job for it (``stream.LayerWork``)."""

    def __init__(
        self, calibration: Calibration, layer: int, skeleton: Skeleton, jobs: CalibratedJobs, linears: LinearJobs,
        ticker: Ticker, settle: Settle,
    ) -> None:  # fmt: skip
        self._of, self._layer, self._jobs, self._linears, self._ticker = calibration, layer, jobs, linears, ticker
        self._settle = settle
        self._experts = skeleton.experts(layer)

    def linears(self, linears: Linears) -> None:
        self._linears.run(self._layer, linears, self._of.settings, self._ticker)

    def expert(self, expert: int, routed: Routed, inputs: Inputs) -> Tensor:
        self._ticker.check()
        stored = self._of.experts[self._layer, expert]
        chosen = {p: treatment_of(job) for p, w in stored.items() if (job := self._jobs.job_of(w)) is not None}
        rounded = [p for p, weight in stored.items() if self._jobs.is_rounded(weight)]
        settings = self._of.settings
        if all(self._jobs.is_done(stored[p]) for p in chosen):
            made = {*chosen, *rounded} if settings.propagate == "quantized" else set()
            return routed.outputs(Expert({
                p: self._jobs.read(weight) if p in made else self._of.read(weight, 0, weight.shape[0])
                for p, weight in stored.items()
            }, self._gating))  # fmt: skip
        weights = {p: self._of.read(weight, 0, weight.shape[0]) for p, weight in stored.items()}
        where = stored[next(iter(chosen))].module.rpartition(".")[0]
        found, outputs = calibrate_expert(
            weights, chosen, routed, inputs, self._gating, where, settings,
            self._over({p: stored[p] for p in chosen}), {p: self._jobs.read(stored[p]) for p in rounded},
        )  # fmt: skip
        for projection, result in found.items():
            self._jobs.write(stored[projection], result.weight, facts(result, settings), result.fold_scale)
        self._jobs.flush(stored[p] for p in chosen)
        return outputs

    def _over(self, chosen: Mapping[str, StoredWeight]) -> Over | None:
        """How far results are over the quality budget, where the recipe asks for retries."""
        limits = {p: limit for p, weight in chosen.items() if (limit := self._of.limits.get(weight.weight.name))}
        if not limits:
            return None

        def over(projection: str, result: Int4Weight) -> float:
            if projection not in limits:
                return 0.0
            return relative_error(chosen[projection], result) - limits[projection]

        return over

    def settled(self) -> bool:
        """Not if the plan was amended."""
        return not self._settle(self._layer)

    def give_up(self) -> None:
        self._jobs.drop(self._layer)

    def _gating(self, gate_up: Tensor) -> Tensor:
        found: Tensor = self._experts._apply_gate(gate_up)
        return found


def _resident(max_memory: int | None) -> int:
    """Resident bytes with what calibration imports; without a limit nothing is imported for it."""
    if max_memory is None:
        return 0
    from ..calibration.model import libraries

    libraries()
    return resident_bytes()


def settings_of(plan: Plan) -> ExpertSettings:
    """What the recipe says of calibration."""
    section = plan.recipe.calibration
    if section is None:
        raise RuntimeError("a recipe without calibration has calibrated jobs")
    gptq = GptqSettings(percdamp=section.percdamp)
    return ExpertSettings(
        gptq, section.min_tokens, section.propagate, bool(section.route_all), section.down_inputs
    )  # fmt: skip
