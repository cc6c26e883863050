"""Made-up weights for the kernel tests: seeded, full of the codes and magnitudes that break shortcuts."""

from __future__ import annotations

import numpy as np


def fp8_codes(seed: int, shape: tuple[int, int]) -> np.ndarray:
    """Any e4m3 code but NaN, subnormals and both zeros included."""
    codes = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    codes[codes & 0x7F == 0x7F] = 0x7E
    return codes


def scales_for(seed: int, shape: tuple[int, int], block: tuple[int, int]) -> np.ndarray:
    grid = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    return (np.random.default_rng(seed).random(grid, dtype=np.float32) + 0.5) * np.float32(2e-4)


def spread(seed: int, shape: tuple[int, int]) -> np.ndarray:
    """Normal weights whose groups differ in size by orders of magnitude."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 10.0 ** rng.uniform(-6, 2, shape[1])).astype(np.float32)


def bf16(values: np.ndarray) -> np.ndarray:
    """float32 to bf16 bits by numpy integers (finite values only)."""
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
