"""Speed of the conversion kernels in one thread, against torch's own casts and a memory copy.

    python bench/bench_kernels.py [--rows 2048] [--columns 6144] [--twin] [--json FILE]

Gelem/s = 1e9 weights per second of the thread's processor time, best of several runs on one GLM-5.2-shaped expert
projection. Each instruction-set level of the native library is timed; ``--twin`` adds the torch twin (slow).
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from quantkit_kernels.native import Native
from quantkit_kernels.registry import Backend
from quantkit_kernels.search import METHODS

BLOCK = (128, 128)


def best_seconds(call: Callable[[], object], budget: float = 0.6) -> float:
    """Fastest run within the time budget, at least two runs."""
    times: list[float] = []
    while len(times) < 2 or sum(times) < budget:
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return min(times)


def operations(backend: Backend, rows: int, columns: int) -> dict[str, Callable[[], object]]:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(0.02)
    bits = backend.float32_to_bf16(weight.reshape(-1)).reshape(rows, columns)
    codes, scales = backend.float_to_fp8(weight, 0, BLOCK)
    int4 = backend.fp8_to_int4(codes, scales, BLOCK, 0, 32, METHODS["rtn"])
    return {
        "fp8_to_int4 rtn g32": lambda: backend.fp8_to_int4(codes, scales, BLOCK, 0, 32, METHODS["rtn"]),
        "fp8_to_int4 rtn g128": lambda: backend.fp8_to_int4(codes, scales, BLOCK, 0, 128, METHODS["rtn"]),
        "fp8_to_int4 mse g32": lambda: backend.fp8_to_int4(codes, scales, BLOCK, 0, 32, METHODS["mse"]),
        "fp8_to_int4 mse g128": lambda: backend.fp8_to_int4(codes, scales, BLOCK, 0, 128, METHODS["mse"]),
        "bf16_to_int4 rtn g32": lambda: backend.float_to_int4(bits, 0, 32, METHODS["rtn"]),
        "fp8_to_bf16": lambda: backend.fp8_to_bf16(codes, scales, BLOCK, 0),
        "fp8_to_float32": lambda: backend.fp8_to_float32(codes, scales, BLOCK, 0),
        "int4_to_bf16": lambda: backend.int4_to_bf16(int4.packed, int4.scale, columns, 32),
        "float_to_fp8 (bf16)": lambda: backend.float_to_fp8(bits, 0, BLOCK),
        "float32_to_bf16": lambda: backend.float32_to_bf16(weight.reshape(-1)),
    }


def peers(rows: int, columns: int) -> dict[str, float]:
    """Seconds of torch's FP8 -> BF16 cast (no scale), one thread, and of copying the codes."""
    import torch

    torch.set_num_threads(1)
    codes = torch.randint(0, 100, (rows, columns), dtype=torch.uint8).view(torch.float8_e4m3fn)
    array = codes.view(torch.uint8).numpy()
    return {
        "torch fp8.to(bfloat16)": best_seconds(lambda: codes.to(torch.bfloat16)),
        "numpy copy of the codes": best_seconds(lambda: array.copy()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--columns", type=int, default=6144)
    parser.add_argument("--twin", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    backends: dict[str, Backend] = {level: Native.load(level) for level in Native.load().isa_available}
    if options.twin:
        import torch

        from quantkit_kernels.torch_twin import TorchTwin

        torch.set_num_threads(1)
        backends["torch"] = TorchTwin()
    elements = options.rows * options.columns
    results: dict[str, dict[str, float]] = {}
    for name, backend in backends.items():
        for operation, call in operations(backend, options.rows, options.columns).items():
            results.setdefault(operation, {})[name] = elements / best_seconds(call) / 1e9
    for peer, seconds in peers(options.rows, options.columns).items():
        results[peer] = {"peer": elements / seconds / 1e9}
    print(f"Gelem/s, one thread, {options.rows} x {options.columns}")
    for operation, rates in results.items():
        print(f"  {operation:24s} " + "  ".join(f"{name} {rate:7.3f}" for name, rate in rates.items()))
    if options.json:
        record = {"shape": [options.rows, options.columns], "machine": platform.machine(), "gelem_per_s": results}
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
