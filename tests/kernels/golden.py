"""One fixed input for every operation, and the SHA-256 of what comes out.

Run as a script to print the table again after an intended change of numerics.
"""

from __future__ import annotations

import hashlib
from dataclasses import astuple
from typing import Any

import numpy as np

from quantkit_kernels import Int4Weight
from quantkit_kernels.registry import Backend
from quantkit_kernels.search import METHODS


def inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [200, 384], their scales in blocks of 128, and a plain weight [200, 384]; integer arithmetic only, so
    that no library's random numbers are part of the contract."""
    index = np.arange(200 * 384, dtype=np.uint64)
    mixed = ((index * np.uint64(2654435761)) ^ (index >> np.uint64(3))) * np.uint64(40503)
    codes = ((mixed >> np.uint64(11)) & np.uint64(0xFF)).astype(np.uint8).reshape(200, 384)
    codes[codes & 0x7F == 0x7F] = 0
    scales = ((np.arange(6) + 1) / 8192).astype(np.float32).reshape(2, 3)
    exponent = (100 + (mixed >> np.uint64(40)) % np.uint64(30)).astype(np.uint32) << 23
    fraction = ((mixed >> np.uint64(17)) & np.uint64(0x7FFFFF)).astype(np.uint32)
    sign = ((mixed >> np.uint64(9)) & np.uint64(1)).astype(np.uint32) << 31
    return codes, scales, (sign | exponent | fraction).view(np.float32).reshape(200, 384)


def digest(result: Any) -> str:
    parts = (
        astuple(result) if isinstance(result, Int4Weight) else result if isinstance(result, tuple) else (result,)
    )
    return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()


def digests(backend: Backend) -> dict[str, str]:
    codes, scales, weight = inputs()
    fp8 = (codes, scales, (128, 128), 0)
    int4 = backend.fp8_to_int4(*fp8, 32, METHODS["rtn"])
    results: dict[str, Any] = {
        "fp8_to_float32": backend.fp8_to_float32(*fp8),
        "fp8_to_bf16": backend.fp8_to_bf16(*fp8),
        "int4_to_float32": backend.int4_to_float32(int4.packed, int4.scale, 384, 32),
        "int4_to_bf16": backend.int4_to_bf16(int4.packed, int4.scale, 384, 32),
        "float_to_fp8": backend.float_to_fp8(weight, 0, (128, 128)),
        "float32_to_bf16": backend.float32_to_bf16(weight.reshape(-1)),
    }
    for method, factors in METHODS.items():
        for group_size in (32, 64, 128):
            results[f"fp8_to_int4 {method} g{group_size}"] = backend.fp8_to_int4(*fp8, group_size, factors)
            results[f"float_to_int4 {method} g{group_size}"] = backend.float_to_int4(
                weight, 0, group_size, factors
            )
    return {name: digest(result) for name, result in results.items()}


if __name__ == "__main__":
    from quantkit_kernels.torch_twin import TorchTwin

    for name, value in digests(TorchTwin()).items():
        print(f'    "{name}": "{value}",')
