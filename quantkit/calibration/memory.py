"""How many experts at once fit into the memory that the user allows.

::

    peak = resident now + weights of one layer + max(tasks * task, linear) + working arrays

*Resident now* is interpreter, torch, transformers, headers and plan: measured. A layer counts without its routed
experts, in float32. A *task* is the larger of one expert (weights, their quantized numbers, the sweep's copies,
the Hessian and its factor, a chunk of tokens, outputs that wait) and one batch on its way through attention. A
*linear* outside the experts has the memory of all tasks to itself: first its Hessian grows while batches pass,
then it is quantized. Working arrays (hidden states) get what is left, at most a quarter of the limit, and lie in
mapped files beyond that, whose pages are given back as soon as they were used. What was freed is given back
between the phases of a layer, since an allocator keeps it otherwise (300 MiB after a few experts of GLM-5.2);
under a limit large blocks go back at once (``free_at_once``): without it gptq+awq on experts of 2048 x 1024 took
751 MiB within a limit of 687 MiB.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

from quantkit.errors import EnvironmentProblem
from quantkit.units import format_bytes

from .experts import CHUNK_TOKENS

ARRAY_SHARE = 4
DEFAULT_ARRAY_BYTES = 8 << 30  # working arrays in memory when there is no limit
_FLOAT = 4
_MMAP_THRESHOLD, _LARGE_BYTES = -3, 4 << 20  # M_MMAP_THRESHOLD of malloc.h


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides the memory of calibration.

    Attributes:
        hidden, inner: width of hidden states and of an expert.
        heads: attention heads.
        layer_weights: of the largest layer, routed experts left out.
        batch, length: samples and tokens of one batch.
        routed: tokens of an expert, on average; one that has more of them needs more.
        columns, stage: widest input and most weights of a stage of linears outside the experts; 0 without any.
    """

    hidden: int
    inner: int
    heads: int
    layer_weights: int
    batch: int
    length: int
    routed: int = 0
    columns: int = 0
    stage: int = 0

    @property
    def task_bytes(self) -> int:
        weights = 3 * self.hidden * self.inner
        sweep = 4 * 2 * self.inner * self.hidden
        hessian = 3 * max(self.hidden, self.inner) ** 2
        chunk = CHUNK_TOKENS * (self.hidden + 4 * self.inner)
        outputs = self.routed * self.hidden  # of an expert that is done, until those before it are
        expert = 2 * weights + sweep + hessian + chunk + outputs
        return _FLOAT * max(expert, self._attention)

    @property
    def _attention(self) -> int:
        return self.batch * self.length * (3 * self.heads * self.length + 16 * self.hidden)

    def working_bytes(self, tasks: int) -> int:
        """Without weights of the layer and working arrays."""
        found = tasks * self.task_bytes
        if self.stage:
            inputs = self.batch * self.length * self.columns
            hessian = self.columns**2 + 4 * inputs
            gathering = hessian + tasks * (self._attention + inputs)
            found = max(found, _FLOAT * gathering, _FLOAT * (6 * self.columns**2 + 6 * self.stage))
        return found


@dataclass(frozen=True, slots=True)
class CalibrationBudget:
    """Tasks at once, and bytes of working arrays that stay out of files."""

    workers: int
    array_bytes: int


def choose_workers(workers: int, max_memory: int | None, resident: int, shape: Shape) -> CalibrationBudget:
    """Fit tasks and arrays into ``max_memory`` bytes (None: no limit).

    Raises:
        EnvironmentProblem: not even one task fits; the least that does is stated.
    """
    if max_memory is None:
        return CalibrationBudget(workers, DEFAULT_ARRAY_BYTES)
    fixed = resident + _FLOAT * shape.layer_weights
    least = fixed + shape.working_bytes(1)
    if max_memory < least:
        raise EnvironmentProblem(
            f"{format_bytes(max_memory)} of memory are not enough to calibrate: {format_bytes(least)} are needed",
            where="--max-memory", hint="Allow more, or convert without calibration: --method mse",
        )  # fmt: skip
    arrays = min(max_memory // ARRAY_SHARE, max_memory - least)
    left = max_memory - fixed - arrays
    return CalibrationBudget(max(n for n in range(1, workers + 1) if shape.working_bytes(n) <= left), arrays)


def largest_layer(weights: Iterable[tuple[int | None, int]]) -> int:
    """Most weights of one layer, from (layer, number of weights)."""
    layers: dict[int, int] = {}
    for layer, count in weights:
        if layer is not None:
            layers[layer] = layers.get(layer, 0) + count
    return max(layers.values(), default=0)


def largest_stage(linears: Iterable[tuple[str, tuple[int, int]]]) -> tuple[int, int]:
    """Widest input, and most weights of one stage, from (name, shape ``[O, I]``) of linears.

    Which linears share their inputs is known when a layer runs; no more do than lie beside each other and are as
    wide.
    """
    stages: dict[tuple[str, int], int] = {}
    for name, (outputs, inputs) in linears:
        key = (name.rpartition(".")[0], inputs)
        stages[key] = stages.get(key, 0) + outputs * inputs
    return max((inputs for _, inputs in stages), default=0), max(stages.values(), default=0)


def free_at_once() -> None:
    """Large blocks leave the process when they are freed, where the C library can do that (glibc's ``mallopt``).

    glibc raises the size from which on it does so up to 32 MiB, by the blocks that are freed. Then the matrices of
    a model with a few thousand columns lie in heaps with holes between them, and memory follows no formula.
    """
    options = getattr(ctypes.CDLL(None), "mallopt", None)
    if options is not None:
        options(ctypes.c_int(_MMAP_THRESHOLD), ctypes.c_int(_LARGE_BYTES))


def give_back_freed() -> None:
    """Return memory that was freed to the system, where the C library can (glibc's ``malloc_trim``)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
