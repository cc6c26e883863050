"""Figure 4 of the kernels: speed of the conversions, of every instruction set, against torch's cast and a copy.

    python bench/kernels/conversion.py [--json FILE]

Gelem/s = 1e9 weights per second, best of several runs on one GLM-5.2-shaped expert projection (2048 x 6144). One
thread is measured in processor time, so that what else runs here counts less; two threads in wall time, each with
half of the rows, as the converter cuts them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measure import Row, write_rows
from quantkit_kernels.native import Native
from quantkit_kernels.registry import Backend
from quantkit_kernels.search import METHODS

ROWS, COLUMNS, BLOCK = 2048, 6144, (128, 128)
ELEMENTS = ROWS * COLUMNS
TARGET = 3.0  # Gelem/s of FP8 block to INT4, rtn, on two cores


def best(call: Callable[[], object], clock: Callable[[], float], budget: float = 0.6) -> float:
    """Seconds of the fastest run within the time budget, at least three runs."""
    times: list[float] = []
    end = time.perf_counter() + budget
    while len(times) < 3 or time.perf_counter() < end:
        start = clock()
        call()
        times.append(clock() - start)
    return min(times)


class Weights:
    """The inputs: one projection as float32, BF16 bits, FP8 blocks and INT4."""

    def __init__(self, backend: Backend) -> None:
        rng = np.random.default_rng(0)
        self.plain = rng.standard_normal((ROWS, COLUMNS), dtype=np.float32) * np.float32(0.02)
        self.bits = backend.float32_to_bf16(self.plain.reshape(-1)).reshape(ROWS, COLUMNS)
        self.codes, self.scales = backend.float_to_fp8(self.plain, 0, BLOCK)
        self.int4 = backend.fp8_to_int4(self.codes, self.scales, BLOCK, 0, 32, METHODS["rtn"])

    def to_int4(self, backend: Backend, method: str, group_size: int, rows: slice = slice(0, ROWS)) -> object:
        return backend.fp8_to_int4(
            self.codes[rows], self.scales, BLOCK, rows.start, group_size, METHODS[method]
        )  # fmt: skip


def operations(backend: Backend, w: Weights) -> dict[str, Callable[[], object]]:
    calls: dict[str, Callable[[], Any]] = {
        f"FP8 block to INT4 g{size}, {method}": lambda m=method, s=size: w.to_int4(backend, m, s)
        for method in METHODS
        for size in (32, 64, 128)
    }
    counts = np.zeros(16, np.int64)
    return calls | {
        "FP8 block to INT4 g32, rtn, with histogram": lambda: backend.fp8_to_int4(
            w.codes, w.scales, BLOCK, 0, 32, METHODS["rtn"], counts
        ),
        "BF16 to INT4 g32, rtn": lambda: backend.float_to_int4(w.bits, 0, 32, METHODS["rtn"]),
        "FP8 block to BF16": lambda: backend.fp8_to_bf16(w.codes, w.scales, BLOCK, 0),
        "FP8 block to float32": lambda: backend.fp8_to_float32(w.codes, w.scales, BLOCK, 0),
        "INT4 g32 to BF16": lambda: backend.int4_to_bf16(w.int4.packed, w.int4.scale, COLUMNS, 32),
        "BF16 to FP8 block": lambda: backend.float_to_fp8(w.bits, 0, BLOCK),
        "float32 to BF16": lambda: backend.float32_to_bf16(w.plain.reshape(-1)),
    }


def two_threads(backend: Backend, w: Weights, group_size: int) -> float:
    """Seconds for the whole weight, half of the rows each."""
    halves = (slice(0, ROWS // 2), slice(ROWS // 2, ROWS))
    with ThreadPoolExecutor(2) as pool:

        def convert() -> None:
            list(pool.map(lambda rows: w.to_int4(backend, "rtn", group_size, rows), halves))

        return best(convert, time.perf_counter, 2.0)


def peers(w: Weights) -> Iterator[tuple[str, float]]:
    """Gelem/s of torch's FP8 -> BF16 cast (no scale), one thread, and of copying the codes."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    codes = torch.from_numpy(w.codes).view(torch.float8_e4m3fn)
    yield "torch fp8.to(bfloat16), no scale", rate(best(lambda: codes.to(torch.bfloat16), time.thread_time))
    yield "numpy copy of the codes", rate(best(w.codes.copy, time.thread_time))
    torch.set_num_threads(threads)


def rate(seconds: float) -> float:
    return ELEMENTS / seconds / 1e9


def rows() -> list[Row]:
    level = Native.load().isa
    w = Weights(Native.load())
    found = []
    for size in (32, 64, 128):
        value = rate(two_threads(Native.load(), w, size))
        name = f"FP8 block to INT4 g{size}, rtn, two threads, {level}"
        found.append(Row(name, value, "Gelem/s", target=f">= {TARGET:g}", holds=value >= TARGET))
    others = list(peers(w))
    for name, value in others:
        found.append(Row(name, value, "Gelem/s"))
    cast, cast_rate = others[0]
    for number, isa in enumerate(Native.load().isa_available):
        if isa == "avx512_bf16":
            continue  # the conversions of avx512
        for operation, call in operations(Native.load(isa), w).items():
            value = rate(best(call, time.thread_time, 0.5 if number else 0.3))
            with_peer = (cast, cast_rate) if operation == "FP8 block to BF16" else (None, None)
            found.append(Row(f"{operation}, one thread, {isa}", value, "Gelem/s", *with_peer))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    path = parser.parse_args().json
    write_rows(rows(), path)


if __name__ == "__main__":
    main()
