"""The calibrated part of a conversion, done by another quantizer; the counterpart of ``calibrated.Calibration``.

The other engine needs the whole model: it gets a BF16 copy of the source beside the work, and memory is counted
before anything is written. What it returns goes the way of all jobs: packed, compared with the source's exact
numbers for the error, into the shard, the journal and ``tensors.jsonl``. Fates, names and layout are the plan's,
so an artifact differs from one of our own engine in the bytes of its INT4 weights only.

A killed run keeps all that our own jobs did and starts the other engine again from the first layer.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from ..artifact.bf16_copy import bf16_copy_bytes, write_bf16_copy
from ..artifact.dequantize import dequantize
from ..artifact.durable import disk_errors
from ..calibration.weights import routed_experts
from ..checkpoint.tensor import Storage, StoredWeight
from ..errors import EnvironmentProblem, SourceError
from ..models.classify import find_family
from ..models.config import text_config
from ..plan.memory import available_bytes, resident_bytes
from ..units import format_bytes
from . import llmcompressor
from .calibrated_jobs import CalibratedJobs, is_calibrated
from .calibration_state import FOLDER
from .on_grid import int4_on_grid
from .progress import Ticker
from .shards import ShardState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..calibration.samples import CalibrationSet
    from ..checkpoint import Checkpoint
    from ..plan import Plan
    from .calibrated import Settle
    from .target import Target

_FLOAT, _BF16 = 4, 2
# Float32 copies of a layer's weights while it is tuned: rounding, its gradient and best value, clipping, weight.
_AUTOROUND_COPIES = 6


class ForeignCalibration:
    """All calibrated jobs of a conversion with ``engine: llmcompressor``.

    Args:
        max_memory: as given to ``convert``; the engine can't be held to it, so it must be enough.

    Raises:
        EnvironmentProblem: the model does not fit into the memory there is, or the engine is not installed.
    """

    def __init__(
        self, plan: Plan, checkpoint: Checkpoint, target: Target, samples: CalibrationSet, max_memory: int | None
    ) -> None:
        self.samples = samples
        self._recipe, self._checkpoint = plan.recipe, checkpoint
        self._folder = target.work / FOLDER / "bf16"
        classifier = find_family(checkpoint.config, checkpoint.tensors, override=plan.recipe.family)
        names = {job.sources[0] for job in plan.jobs("decode") if is_calibrated(job)}
        self._weights = {
            (layer, expert, projection): weight
            for (layer, expert), stored in routed_experts(checkpoint, classifier).items()
            for projection, weight in stored.items()
            if weight.weight.name in names
        }
        needed = bf16_copy_bytes(checkpoint) + _work_bytes(self._weights, plan, checkpoint, samples)
        check_memory(needed, max_memory)

    def space_needed(self) -> int:
        """Bytes on the target's disk while it runs: the BF16 copy."""
        return bf16_copy_bytes(self._checkpoint)

    def run(self, states: Sequence[ShardState], ticker: Ticker, settle: Settle) -> None:
        """Do what is left; there is nothing to ``settle``, since planning refuses a budget with this engine.

        Raises:
            SourceError: numbers that are not finite, in the weights or in the activations.
            UnsupportedError: the engine can't run this model.
            EnvironmentProblem: disk or memory, or an engine that returns what quantkit does not know.
        """
        jobs = CalibratedJobs(states, ticker)
        if not jobs.layers_left():
            return
        task = self._task()
        for weight in self._weights.values():
            self._check_finite(weight)
        with disk_errors(self._folder):
            shutil.rmtree(self._folder, ignore_errors=True)
            write_bf16_copy(self._checkpoint, self._folder)
        ticker.check()
        for result in llmcompressor.quantize(task):
            self._write(jobs, result, task)
        jobs.flush(self._weights.values())

    def _task(self) -> llmcompressor.Task:
        decode, section = self._recipe.decode, self._recipe.calibration
        if section is None:
            raise RuntimeError("a recipe without calibration has calibrated jobs")
        return llmcompressor.Task(
            self._folder, self.samples.token_ids, frozenset(self._weights), decode.method, decode.group_size,
            section.percdamp, section.propagate == "quantized",
        )  # fmt: skip

    def _write(self, jobs: CalibratedJobs, result: llmcompressor.Rounded, task: llmcompressor.Task) -> None:
        weight = self._weights[result.key]
        exact = dequantize(self._checkpoint, weight)
        found = int4_on_grid(exact, result.values, result.scale, weight.module)
        jobs.write(weight, found, facts(task, result.is_fallback))

    def _check_finite(self, weight: StoredWeight) -> None:
        """Plain weights; codes and scales are checked where they are dequantized."""
        import numpy as np

        if weight.storage is Storage.PLAIN and not np.isfinite(dequantize(self._checkpoint, weight)).all():
            raise SourceError("NaN or infinity", where=weight.weight.place, hint="Download the source again.")


def facts(task: llmcompressor.Task, is_fallback: bool) -> dict[str, Any]:
    """What the artifact records of a weight; see docs/format.md. Every expert sees all tokens."""
    form = "none" if is_fallback else {"gptq": "dense", "autoround": "signed-gradient"}[task.method]
    return {
        "tokens": task.token_ids.size, "shrunk": False, "form": form,
        "percdamp": task.percdamp if form == "dense" else 0.0, "attempts": 1, "rows_from_floor": 0,
        "error_to_rtn": None,
    }  # fmt: skip


def check_memory(needed: int, max_memory: int | None) -> None:
    """Whether ``needed`` bytes fit, besides what the process holds, into the memory that is there and allowed.

    Raises:
        EnvironmentProblem: with both numbers.
    """
    allowed = None if max_memory is None else max(0, max_memory - resident_bytes())
    limits = (("memory", "are available", available_bytes()), ("--max-memory", "of it are left", allowed))
    for where, says, limit in limits:
        if limit is not None and needed > limit:
            raise EnvironmentProblem(
                f"llm-compressor loads the whole model: {format_bytes(needed)} are needed, {format_bytes(limit)} "
                f"{says}", where=where, hint="Use --engine quantkit, which holds one expert at a time.",
            )  # fmt: skip


def _work_bytes(
    weights: Mapping[llmcompressor.Key, StoredWeight], plan: Plan, checkpoint: Checkpoint, samples: CalibrationSet
) -> int:
    """What the engine needs besides the model: a layer's experts twice while they are loaded and again while they
    are quantized, GPTQ's Hessian of each linear of a layer, hidden states before and behind it."""
    layers: defaultdict[int, int] = defaultdict(int)
    for (layer, _, _), weight in weights.items():
        rows, columns = weight.shape
        own = _FLOAT * (columns**2 if plan.recipe.decode.method == "gptq" else _AUTOROUND_COPIES * rows * columns)
        layers[layer] += own + 2 * _BF16 * rows * columns
    width = text_config(checkpoint.config).get("hidden_size", 0)
    hidden = width * samples.token_ids.size if isinstance(width, int) else 0
    return max(layers.values(), default=0) + 2 * _BF16 * hidden
