"""The Triton conversions give the bits of the torch twin, and its errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from quantkit_kernels.forward.triton import conversion
from quantkit_kernels.registry import Backend
from quantkit_kernels.search import METHODS
from quantkit_kernels.torch_twin import TorchTwin

from ..test_same_bits import FLOATS, outcome
from ..weights import bf16, fp8_codes, scales_for, spread


def agree(call: Callable[[Backend], Any]) -> None:
    assert outcome(lambda: call(conversion.TritonBackend())) == outcome(lambda: call(TorchTwin()))


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("method", ["rtn", "mse"])
@pytest.mark.parametrize("block", [(128, 128), (3, 7), (1, 256)])
def test_fp8_to_int4(block: tuple[int, int], method: str, group_size: int) -> None:
    codes = fp8_codes(group_size, (5, 259))[:, 1:257]
    codes[3] &= 0x87  # zeros and subnormals
    scales = scales_for(1, (7, 256), block)
    agree(lambda b: b.fp8_to_int4(codes, scales, block, 2, group_size, METHODS[method]))


@pytest.mark.parametrize("exponent", [-44, -36, 0, 36])
def test_sizes_of_scales_and_tiles_of_rows(exponent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "TILE_ELEMENTS", 128 * 3)
    codes = fp8_codes(3, (7, 128))
    scales = (scales_for(4, (7, 128), (2, 32)).astype(np.float64) * 10.0**exponent / 2e-4).astype(np.float32)
    agree(lambda b: b.fp8_to_int4(codes, scales, (2, 32), 0, 32, METHODS["mse"]))
    agree(lambda b: b.fp8_to_float32(codes, scales, (2, 32), 0))
    agree(lambda b: b.fp8_to_bf16(codes, scales, (2, 32), 0))
    agree(lambda b: b.float_to_fp8(spread(5, (7, 100)), 0, (2, 33)))


@pytest.mark.parametrize("method", ["rtn", "mse"])
@pytest.mark.parametrize("kind", ["spread", "special", "patterns"])
def test_float_to_int4_and_fp8(kind: str, method: str) -> None:
    rng = np.random.default_rng(6)
    weight = {
        "spread": spread(7, (5, 256)),
        "special": rng.choice(FLOATS, (5, 256)),
        "patterns": rng.integers(0, 1 << 32, (5, 256), dtype=np.uint32).view(np.float32),
    }[kind]
    weight = np.where(np.isfinite(weight), weight, np.float32(1.0))
    for source in (weight, bf16(weight)):
        agree(lambda b, source=source: b.float_to_int4(source, 1, 64, METHODS[method]))
        agree(lambda b, source=source: b.float_to_fp8(source, 1, (3, 100)))


def test_float_to_int4_by_importance() -> None:
    importance = np.random.default_rng(8).random(128, dtype=np.float32) ** 8
    importance[::5] = 0.0
    agree(lambda b: b.float_to_int4(spread(9, (5, 128)), 0, 32, METHODS["mse"], importance))


@pytest.mark.parametrize("group_size", [5, 32, 4096])
def test_int4_to_float(group_size: int) -> None:
    rng = np.random.default_rng(group_size)
    packed = rng.integers(-(2**31), 2**31, (3, 17), dtype=np.int32)
    scale = rng.integers(0, 0x7F80, (3, -(-133 // group_size)), dtype=np.uint16)
    agree(lambda b: b.int4_to_float32(packed, scale, 133, group_size))
    agree(lambda b: b.int4_to_bf16(packed, scale, 133, group_size))


def test_casts() -> None:
    """Every bf16, NaN and Inf too; float32 with any lower half."""
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    agree(lambda b: b.bf16_to_float32(bits))
    lower = np.random.default_rng(0).integers(0, 1 << 16, 1 << 16, dtype=np.uint32)
    agree(lambda b: b.float32_to_bf16(((bits.astype(np.uint32) << 16) | lower).view(np.float32)))


def test_the_first_bad_number_is_named() -> None:
    codes, scales = fp8_codes(1, (4, 128)), scales_for(2, (4, 128), (1, 32))
    codes[2, 70], codes[3, 1] = 0x7F, 0xFF
    agree(lambda b: b.fp8_to_int4(codes, scales, (1, 32), 0, 32, METHODS["rtn"]))
    agree(lambda b: b.fp8_to_float32(codes, scales, (1, 32), 0))
    scales[1, 3] = np.inf
    agree(lambda b: b.fp8_to_int4(codes, scales, (1, 32), 0, 32, METHODS["mse"]))
    weight = spread(3, (4, 128))
    weight[3, 2], weight[1, 127] = np.nan, -np.inf
    agree(lambda b: b.float_to_int4(weight, 2, 32, METHODS["rtn"]))
    agree(lambda b: b.float_to_fp8(weight, 2, (2, 128)))


def test_empty() -> None:
    agree(lambda b: b.fp8_to_bf16(np.zeros((0, 64), np.uint8), np.zeros((0, 1), np.float32), (128, 128), 0))
    agree(lambda b: b.float32_to_bf16(np.zeros(0, np.float32)))
