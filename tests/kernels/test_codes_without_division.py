"""INT4 codes found by bounds instead of a division (csrc/convert_impl.h) are those of the division, bit for bit.

What could break the claim lies near the half-integers, so scales and weights are made to land there: exactly, and
one step of float32 to either side.
"""

from __future__ import annotations

import numpy as np
import pytest

from quantkit_kernels.search import METHODS, Method

from .backends import load, native_levels

LEVELS = native_levels()
pytestmark = pytest.mark.skipif(not LEVELS, reason="the native library was not built")
F32 = np.float32


def by_division(weight: np.ndarray, scale_bits: np.ndarray) -> np.ndarray:
    """q of every weight by numpy's IEEE division; the scale of its group, groups of 32."""
    scale = (scale_bits.astype(np.uint32) << 16).view(F32).repeat(32, axis=1)
    with np.errstate(under="ignore"):
        return np.clip(np.rint(weight / scale), -8, 7).astype(np.int8)


def codes(packed: np.ndarray) -> np.ndarray:
    return (((packed[..., None] >> np.arange(0, 32, 4)) & 15) - 8).astype(np.int8).reshape(packed.shape[0], -1)


def near_boundaries(scales: np.ndarray) -> np.ndarray:
    """Groups of 32: absmax first, which makes each scale; then half-integers times it, and their neighbours."""
    halves = np.arange(-7.5, 7, 1, dtype=F32)[None] * scales[:, None].astype(F32)
    steps = [halves, np.nextafter(halves, F32(np.inf)), np.nextafter(halves, F32(-np.inf))]
    spread = np.stack(steps, axis=1).reshape(len(scales), -1)  # [S, 45]
    top = (scales[:, None] * F32(7.5)).astype(F32)
    return np.concatenate([np.concatenate([top, spread[:, :31]], 1), np.concatenate([top, spread[:, 14:]], 1)])


def bf16_scales(low: int, high: int, count: int) -> np.ndarray:
    """bf16 numbers with exponents in [low, high)."""
    rng = np.random.default_rng(high + 200)
    bits = (rng.integers(low + 127, high + 127, count) << 7 | rng.integers(0, 128, count)).astype(np.uint32)
    return (bits << 16).view(F32)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("low", "high"), [(-20, 20), (-126, -90), (90, 120)])
def test_weights_around_every_boundary(level: str, low: int, high: int) -> None:
    weight = near_boundaries(bf16_scales(low, high, 3000))
    made = load(level).float_to_int4(weight, 0, 32, METHODS["rtn"])
    assert np.array_equal(codes(made.packed), by_division(weight, made.scale))


@pytest.mark.parametrize("level", LEVELS)
def test_every_fp8_code_under_many_scales(level: str) -> None:
    """All codes of both signs in one row of groups led by each magnitude, under 500 block scales."""
    finite = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
    leaders = np.arange(0x40, 0x7F, 3, dtype=np.uint8)
    parts = [np.resize(finite[start : start + 31], 31) for start in range(0, finite.size, 31)]
    row = np.concatenate([np.insert(part, 0, top) for top in leaders for part in parts])
    rng = np.random.default_rng(1)
    scales = np.exp2(rng.uniform(-30, 10, 500)).astype(F32)
    scales[:40] = np.exp2(np.arange(-20, 20))
    grid = np.tile(row, (500, 1))
    made = load(level).fp8_to_int4(grid, scales[:, None], (1, row.size), 0, 32, METHODS["rtn"])
    weight = load("torch").fp8_to_float32(grid, scales[:, None], (1, row.size), 0)
    assert np.array_equal(codes(made.packed), by_division(weight, made.scale))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("seed", range(3))
def test_random_weights_under_every_candidate(level: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weight = (rng.standard_normal((64, 4096)) * np.exp2(rng.uniform(-8, 8, (64, 1)))).astype(F32)
    for factor in METHODS["mse"].factors[::8]:
        method = Method(np.array([factor], F32), is_unbiased=False)
        made = load(level).float_to_int4(weight, 0, 32, method)
        assert np.array_equal(codes(made.packed), by_division(weight, made.scale))
