"""What this machine can do at most: reading memory, and torch's BF16 matrix product.

Every figure of the kernels is held against these, measured in the same run. Read bandwidth is the better of the
native library's read loop and torch's sum, over 1 GiB that was written before (pages never written are all the
same page of zeros, and come from the cache).
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measure import Row, write_rows
from quantkit_kernels.forward import choice

GIB = 1 << 30


def best(call: Callable[[], object], seconds: float = 1.0, least: int = 5) -> float:
    """Fastest of the runs, in seconds: at least ``least``, then until the time is used up."""
    call()
    times: list[float] = []
    while len(times) < least or sum(times) < seconds:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def best_of_each(calls: dict[str, Callable[[], object]], seconds: float, least: int = 5) -> dict[str, float]:
    """Like ``best`` for several calls that take turns, so that a slow minute of the machine hits all of them."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    spent = 0.0
    while spent < seconds * len(calls) or min(map(len, times.values())) < least:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
            spent += times[name][-1]
    return {name: min(runs) for name, runs in times.items()}


def readers() -> dict[str, Callable[[], object]]:
    """Calls that each read ``GIB`` bytes, to take turns with what is held against them: the bandwidth of a shared
    machine changes by half from one minute to the next.
    """
    data = torch.ones(GIB // 4, dtype=torch.float32)
    library, total = choice.library(), ctypes.c_uint64()
    library.declare({"qk_read_memory": (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p)})
    arguments = (data.data_ptr(), GIB, torch.get_num_threads(), ctypes.byref(total))
    return {"read, native": lambda: library.call("qk_read_memory", *arguments), "read, torch": lambda: data.sum()}


@cache
def read_bandwidth() -> float:
    """Bytes per second with torch's number of threads."""
    return GIB / min(best_of_each(readers(), 2.0, 20).values())


def matrix_rate(rows: int, inputs: int, outputs: int, seconds: float = 1.0) -> float:
    """Floating-point operations per second of torch's BF16 linear."""
    x, w = torch.randn(rows, inputs).bfloat16(), torch.randn(outputs, inputs).bfloat16()
    return 2.0 * rows * inputs * outputs / best(lambda: torch.nn.functional.linear(x, w), seconds)


def rows() -> list[Row]:
    threads = torch.get_num_threads()
    return [
        Row(f"read bandwidth, {threads} threads", read_bandwidth() / 1e9, "GB/s"),
        Row("torch BF16 matrix rate, 512 x 4096 x 4096", matrix_rate(512, 4096, 4096) / 1e9, "GFLOP/s"),
    ]


if __name__ == "__main__":
    write_rows(rows(), sys.argv[1] if len(sys.argv) > 1 else None)
