"""What a kernel reaches of a GPU's read bandwidth and BF16 matrix rate; ``gpu_cases`` says what is measured.

Both limits are measured in the same run, with torch. A case runs inside a CUDA graph, so that launching from
Python doesn't count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

Run = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        name: operation and shape.
        seconds: of one call, the best of three rounds.
        gigabytes, teraflops: what the call has to read, and to multiply and add.
        share: of the nearer limit: the time that it would take at both limits, over the time it took.
        bound: which limit that is, ``read`` or ``matrix``.
    """

    name: str
    seconds: float
    gigabytes: float
    teraflops: float
    share: float | None
    bound: str


@dataclass(frozen=True)
class Machine:
    """The device, its limits in GB/s and TFLOP/s (None in the interpreter), and whether sizes are tiny."""

    device: torch.device
    read: float | None
    matrix: float | None
    is_tiny: bool

    def size(self, full: int, tiny: int) -> int:
        return tiny if self.is_tiny else full

    def time(self, runs: Sequence[Run]) -> float:
        """Seconds of one run."""
        return clock(runs, self.device)

    def row(self, name: str, runs: Sequence[Run], read: float, flops: float) -> Row:
        """``read`` bytes and ``flops`` of one run."""
        seconds = self.time(runs)
        if self.read is None or self.matrix is None:
            return Row(name, seconds, read / 1e9, flops / 1e12, None, "none")
        by_read, by_matrix = read / 1e9 / self.read, flops / 1e12 / self.matrix
        bound = "read" if by_read > by_matrix else "matrix"
        return Row(name, seconds, read / 1e9, flops / 1e12, max(by_read, by_matrix) / seconds, bound)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).bfloat16()

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, device=self.device, dtype=torch.int32)


def clock(runs: Sequence[Run], device: torch.device) -> float:
    for run in runs:  # compiles
        run()
    if device.type != "cuda":
        start = time.perf_counter()
        runs[0]()
        return time.perf_counter() - start
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    repeats, best = 1, float("inf")
    for _ in range(4):  # the first round only says how many replays fill 20 ms
        first, last = _event(), _event()
        first.record()
        for _ in range(repeats):
            graph.replay()
        last.record()
        torch.cuda.synchronize()
        seconds = first.elapsed_time(last) / 1e3 / repeats
        repeats = min(1000, max(1, int(0.02 / seconds)))
        best = min(best, seconds)
    return best / len(runs)


def _event() -> Any:
    make: Any = torch.cuda.Event
    return make(enable_timing=True)


def limits(device: torch.device, *, is_tiny: bool) -> Machine:
    """Read bandwidth of a sum over 4 GiB, matrix rate of a product of 8192 x 8192."""
    if is_tiny:
        return Machine(device, None, None, True)
    numbers = torch.ones(1 << 30, device=device)
    read = numbers.numel() * 4 / 1e9 / clock([numbers.sum], device)
    a, b = (torch.randn(8192, 8192, device=device).bfloat16() for _ in range(2))
    matrix = 2 * 8192**3 / 1e12 / clock([partial(torch.matmul, a, b)], device)
    return Machine(device, read, matrix, False)
