"""The calibrated part of a conversion: layers in order, the experts of one layer in parallel.

It comes after everything else, because it needs the source's files in place and each layer needs the one before.
Results go the way of all jobs: into the shard, into the journal, into ``tensors.jsonl``. Each expert is durable
when it is done, and when those of a layer are, so is the input of the next one (``calibration_state.py``). A run
that is killed repeats the forward pass of the layer it was at, but no expert that was done: these compute with
their INT4 weights read back. If the state of the layer is lost or damaged, the forward pass begins again at the
first layer in the same way.

Every task computes with one torch thread, so workers change time and memory, never a bit. The bits do depend on
the machine: torch chooses its matrix products by the CPU.

Several processes (``calibration/ranks.py``): process 0 runs the whole conversion, the others only ``assist`` here.
They read the source and nothing else; what they find goes to process 0, which writes it and keeps the state.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..artifact.dequantize import RowReader
from ..calibration.device import CPU, device_errors, workers_on
from ..calibration.expert import DOWN, Expert, ExpertSettings, calibrate_expert, facts
from ..calibration.experts import Inputs, Routed
from ..calibration.gptq import GptqSettings
from ..calibration.linears import Linears
from ..calibration.memory import Shape, choose_workers, free_at_once, largest_layer, largest_stage
from ..calibration.ranks import ALONE, Ranks
from ..calibration.skeleton import Skeleton
from ..calibration.stream import Stream, batch_samples
from ..calibration.weights import WeightReader, routed_experts
from ..calibration.workers import Workers
from ..checkpoint.tensor import Storage, StoredWeight
from ..errors import SourceError
from ..models.classify import find_family
from ..models.config import text_config
from ..models.role import Role
from ..plan.memory import resident_bytes
from .assisted_jobs import AssistedJobs
from .calibrated_jobs import CalibratedJobs, PlannedJobs, is_calibrated, treatment_of
from .calibrated_linears import LinearJobs
from .calibration_state import FOLDER, SpilledArrays, load_state, save_state
from .ops import relative_error
from .progress import Ticker
from .shards import ShardState

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from quantkit_kernels import Int4Weight

    from ..artifact.journal import Entry
    from ..calibration.retry import Over
    from ..calibration.samples import CalibrationSet
    from ..checkpoint import Checkpoint
    from ..plan import Plan
    from .target import Target

    Results = Mapping[str, tuple[Int4Weight, dict[str, Any], NDArray[np.float32] | None]]  # by projection

Settle = Callable[[int], bool]


class Calibration:
    """All calibrated jobs of one conversion.

    Args:
        target: of process 0, which alone has one.
        workers: experts at once, if ``max_memory`` allows.
        max_memory: as given to ``convert``.
        ranks: the processes that do this together.
        device: of this process, as ``open_device`` gives it.

    Raises:
        EnvironmentProblem: the memory is not enough for one expert, or transformers is not installed.
    """

    def __init__(
        self, plan: Plan, checkpoint: Checkpoint, target: Target | None, samples: CalibrationSet, workers: int,
        max_memory: int | None, ranks: Ranks = ALONE, device: str = CPU,
    ) -> None:  # fmt: skip
        self.samples, self._ranks, self.device = samples, ranks, device
        self._checkpoint, self._target, self._shards = checkpoint, target, plan.shards
        self.settings = settings_of(plan, device)
        budget = plan.recipe.budget
        self.limits = plan.limits if budget is not None and budget.retries else {}
        self._classifier = find_family(checkpoint.config, checkpoint.tensors, override=plan.recipe.family)
        self.experts = routed_experts(checkpoint, self._classifier)
        shape = self._shape(plan)
        workers = workers_on(device, workers, shape)
        self._budget = choose_workers(workers, max_memory, _resident(max_memory), shape)

    def space_needed(self) -> int:
        """Bytes on the target's disk while it runs: two states of hidden values, and arrays that are mapped."""
        width = text_config(self._checkpoint.config).get("hidden_size", 0)
        return 5 * 4 * self.samples.token_ids.size * width if isinstance(width, int) else 0

    def run(self, states: Sequence[ShardState], ticker: Ticker, settle: Settle) -> None:
        """Do what is left; for process 0.

        Args:
            settle: judges a layer when its experts are done; True: the plan was amended, and nothing of the layer
                is quantized.

        Raises:
            SourceError: activations that are not finite, weights that are missing; the layer and expert are named.
            UnsupportedError: transformers has no such model.
            EnvironmentProblem: the disk refuses; resumable.
        """
        jobs, target = CalibratedJobs(states, ticker), self._target
        left = jobs.layers_left()
        if not left or target is None:
            return
        self._ranks.call()
        folder = target.work / FOLDER
        folder.mkdir(exist_ok=True)
        entries = [entry for entry in target.journal.entries if entry["kind"] == "calibration"]
        last = self._begin(jobs, left[-1])
        with self._stream(folder, jobs) as stream:
            if not _resumes(stream, folder, entries, left[0]):
                stream.stand_at(0)
            for _ in self._layers(stream, last, jobs, ticker, settle):
                target.journal.append(save_state(stream, folder))

    def assist(self) -> None:
        """The same at another process, which has no target; errors as of ``run``."""
        jobs = AssistedJobs(self._shards, self._rows)
        last = self._begin(jobs, 0)
        with tempfile.TemporaryDirectory(prefix="quantkit-") as folder, self._stream(Path(folder), jobs) as stream:
            for _ in self._layers(stream, last, jobs, Ticker(0, None), lambda layer: False):
                pass

    def _begin(self, jobs: PlannedJobs, last: int) -> int:
        """The last layer to pass. All processes know the same jobs then: some were amended by earlier runs."""
        last, quantized = self._ranks.tell((last, jobs.layers))
        for layer in jobs.layers - quantized:
            jobs.drop(layer)
        return last

    @contextmanager
    def _stream(self, folder: Path, jobs: PlannedJobs) -> Iterator[Stream]:
        predictions = max(0, jobs.last_layer() + 1 - (self._classifier.num_layers or 0))
        skeleton = Skeleton(self._checkpoint, self._classifier, self._reader(jobs), predictions, self.device)
        workers = Workers(self._budget.workers)
        try:
            arrays = SpilledArrays(folder, self._budget.array_bytes)
            with device_errors(self.device):
                yield Stream(skeleton, self.samples.token_ids, workers, arrays, self._ranks)
        finally:
            workers.close()

    def _layers(
        self, stream: Stream, last: int, jobs: PlannedJobs, ticker: Ticker, settle: Settle
    ) -> Iterator[int]:
        """Pass the layers up to ``last``; yields each when process 0 has the state after it."""
        linears = LinearJobs(self._checkpoint, self._classifier, jobs, stream.skeleton)
        stream.spread()
        if stream.position == 0:
            stream.embed()
        while stream.position <= last:
            layer = stream.position
            retried = self._ranks.tell(jobs.written.retried(layer) if jobs.written else None)
            if isinstance(jobs, AssistedJobs):
                jobs.learn(retried)
            stream.forward(_Layer(self, layer, stream.skeleton, jobs, linears, ticker, settle))
            stream.gather()
            yield layer

    def _rows(self, weight: StoredWeight) -> RowReader:
        return RowReader(self._checkpoint, weight)

    def read(self, weight: StoredWeight, start: int, stop: int) -> NDArray[np.float32]:
        import numpy as np

        array: NDArray[np.float32] = self._rows(weight).float32(start, stop)
        if weight.storage is Storage.PLAIN and not np.isfinite(array).all():
            raise SourceError("NaN or infinity", where=weight.weight.place, hint="Download the source again.")
        return array

    def _reader(self, jobs: PlannedJobs) -> WeightReader:
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
        top_k, experts = text.get("num_experts_per_tok"), max(expert for _, expert in self.experts) + 1
        return Shape(
            hidden=one[DOWN].shape[0], inner=one[DOWN].shape[1], heads=heads if isinstance(heads, int) else 1,
            layer_weights=layer_weights, batch=min(samples, batch_samples(length)), length=length,
            routed=samples * length * (top_k if isinstance(top_k, int) else 1) // experts,
            columns=columns, stage=stage,
        )  # fmt: skip


class _Layer:
    """One layer: calibrated where there is a job for it (``stream.LayerWork``)."""

    def __init__(
        self, calibration: Calibration, layer: int, skeleton: Skeleton, jobs: PlannedJobs, linears: LinearJobs,
        ticker: Ticker, settle: Settle,
    ) -> None:  # fmt: skip
        self._of, self._layer, self._jobs, self._linears, self._ticker = calibration, layer, jobs, linears, ticker
        self._settle = settle
        self._found: dict[int, Results] = {}  # for process 0, at another one
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
            }, self._gating, self._of.device))  # fmt: skip
        weights = {p: self._of.read(weight, 0, weight.shape[0]) for p, weight in stored.items()}
        where = stored[next(iter(chosen))].module.rpartition(".")[0]
        found, outputs = calibrate_expert(
            weights, chosen, routed, inputs, self._gating, where, settings,
            self._over({p: stored[p] for p in chosen}), {p: self._jobs.read(stored[p]) for p in rounded},
        )  # fmt: skip
        self.take(expert, {p: (r.weight, facts(r, settings), r.fold_scale) for p, r in found.items()})
        return outputs

    def take(self, expert: int, found: Results) -> None:
        written, stored = self._jobs.written, self._of.experts[self._layer, expert]
        if written is None:
            self._found[expert] = found
            return
        for projection, (weight, figures, fold) in found.items():
            written.write(stored[projection], weight, figures, fold)
        written.flush(stored[projection] for projection in found)

    def found(self, expert: int) -> Results:
        return self._found.pop(expert, {})

    def done(self) -> list[int]:
        found = []
        for expert in range(self._experts.num_experts):
            chosen = [w for w in self._of.experts[self._layer, expert].values() if self._jobs.job_of(w)]
            if chosen and all(self._jobs.is_done(weight) for weight in chosen):
                found.append(expert)
        return found

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


def _resumes(stream: Stream, folder: Path, entries: Sequence[Entry], first_left: int) -> bool:
    """Whether the stream stands at the journalled layer; not if a layer before it lost something."""
    return any(
        load_state(stream, folder, entry) for entry in reversed(entries[-2:]) if entry["layer"] < first_left
    )


def _resident(max_memory: int | None) -> int:
    """Resident bytes with what calibration imports; without a limit nothing is imported for it."""
    if max_memory is None:
        return 0
    from ..calibration.model import libraries

    free_at_once()
    libraries()
    return resident_bytes()


def settings_of(plan: Plan, device: str = CPU) -> ExpertSettings:
    """What the recipe says of calibration."""
    section = plan.recipe.calibration
    if section is None:
        raise RuntimeError("a recipe without calibration has calibrated jobs")
    gptq = GptqSettings(percdamp=section.percdamp, device=device)
    return ExpertSettings(
        gptq, section.min_tokens, section.propagate, bool(section.route_all), section.down_inputs
    )  # fmt: skip
