"""Every native level gives the twin's bits, and the twin's errors, on anything the checks let through."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantkit_kernels import BadValueError, Int4Weight
from quantkit_kernels.registry import Backend
from quantkit_kernels.search import METHODS

from .backends import load, native_levels
from .weights import fp8_codes, scales_for, spread

LEVELS = native_levels()
needs_native = pytest.mark.skipif(not LEVELS, reason="the native library was not built")
fast = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
FLOATS = np.array([0.0, -0.0, 1e-45, -1e-45, 1.2e-38, 3e38, -3e38, 1.0, 7.5, -8.0], np.float32)


def outcome(call: Callable[[], Any]) -> list[bytes] | tuple[str, int, int]:
    """Result bits of a call, or the error and its position."""
    try:
        result = call()
    except BadValueError as error:
        return type(error).__name__, error.row, error.column
    parts = (
        astuple(result) if isinstance(result, Int4Weight) else result if isinstance(result, tuple) else (result,)
    )
    return [np.ascontiguousarray(part).tobytes() for part in parts]


def agree(call: Callable[[Backend], Any]) -> None:
    expected = outcome(lambda: call(load("torch")))
    for level in LEVELS:
        assert outcome(lambda level=level: call(load(level))) == expected, level


@st.composite
def fp8_sources(draw: st.DrawFn) -> dict[str, Any]:
    """Codes (any, now and then a NaN), scales of any size, any block, a tile of rows with any stride."""
    rows, words = draw(st.integers(1, 9)), draw(st.integers(1, 20))
    columns = words * 32 + draw(st.sampled_from([0, 0, 2048]))
    block = (draw(st.integers(1, rows + 2)), draw(st.sampled_from([1, 7, 32, 100, 128, columns])))
    seed, exponent = draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from([0, 0, 0, -44, -41, -36, -20, 20, 36]))
    offset = draw(st.integers(0, 5))
    codes = fp8_codes(seed, (rows, columns + 3))[:, draw(st.integers(0, 3)) :][:, :columns]
    if draw(st.booleans()):
        codes &= np.uint8(0x87)  # zeros and subnormals only
    scales = scales_for(seed, (rows + offset, columns), block) / np.float32(2e-4)
    scales = (scales.astype(np.float64) * 10.0**exponent).astype(np.float32)
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        codes[draw(st.integers(0, rows - 1)), draw(st.integers(0, columns - 1))] = draw(
            st.sampled_from([127, 255])
        )
    if draw(st.integers(0, 9)) == 0:
        at = tuple(draw(st.integers(0, n - 1)) for n in scales.shape)
        scales[at] = draw(st.sampled_from([np.inf, np.nan, 0.0, -1.0]))
    return {"codes": codes, "scales": scales, "block": block, "row_offset": offset}


@needs_native
@fast
@given(fp8_sources(), st.sampled_from([32, 64, 128]), st.sampled_from(["rtn", "mse"]))
def test_fp8_to_int4(source: dict[str, Any], group_size: int, method: str) -> None:
    columns = source["codes"].shape[1] // group_size * group_size
    if columns:
        source["codes"] = source["codes"][:, :columns]
        agree(lambda b: b.fp8_to_int4(**source, group_size=group_size, method=METHODS[method]))


@needs_native
@fast
@given(fp8_sources())
def test_fp8_to_float(source: dict[str, Any]) -> None:
    source["codes"] = source["codes"][:, : source["codes"].shape[1] - 5]  # any width
    grid = -(-source["codes"].shape[1] // source["block"][1])
    source["scales"] = source["scales"][:, :grid]
    agree(lambda b: b.fp8_to_float32(**source))
    agree(lambda b: b.fp8_to_bf16(**source))


@st.composite
def plain_sources(draw: st.DrawFn) -> np.ndarray:
    """float32 or bf16 bits: ordinary, special, arbitrary bit patterns, now and then not finite."""
    rows, columns = draw(st.integers(1, 7)), 128 * draw(st.sampled_from([1, 2, 3, 17]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["spread", "special", "patterns"]))
    if kind == "spread":
        weight = spread(int(rng.integers(1 << 30)), (rows, columns))
    elif kind == "special":
        weight = rng.choice(FLOATS, (rows, columns))
    else:
        weight = rng.integers(0, 1 << 32, (rows, columns), dtype=np.uint32).view(np.float32)
        weight[~np.isfinite(weight)] = 1.0
    if draw(st.integers(0, 4)) == 0:
        weight[draw(st.integers(0, rows - 1)), draw(st.integers(0, columns - 1))] = draw(
            st.sampled_from([np.nan, np.inf, -np.inf])
        )
    return (weight.view(np.uint32) >> 16).astype(np.uint16) if draw(st.booleans()) else weight


@needs_native
@fast
@given(plain_sources(), st.sampled_from([32, 64, 128]), st.sampled_from(["rtn", "mse"]), st.integers(0, 9))
def test_float_to_int4(weight: np.ndarray, group_size: int, method: str, offset: int) -> None:
    agree(lambda b: b.float_to_int4(weight, offset, group_size, METHODS[method]))


@needs_native
@fast
@given(plain_sources(), st.sampled_from([32, 64, 128]), st.integers(0, 2**32 - 1))
def test_float_to_int4_by_importance(weight: np.ndarray, group_size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    importance = (rng.random(weight.shape[1]) ** 8 * 1e3).astype(np.float32)
    importance[rng.random(weight.shape[1]) < 0.2] = 0.0
    agree(lambda b: b.float_to_int4(weight, 0, group_size, METHODS["mse"], importance))


@needs_native
@fast
@given(plain_sources(), st.integers(1, 9), st.sampled_from([1, 7, 100, 128, 5000]), st.integers(1, 100))
def test_float_to_fp8(weight: np.ndarray, block_rows: int, block_columns: int, cut: int) -> None:
    agree(lambda b: b.float_to_fp8(weight[:, cut:], 3, (block_rows, block_columns)))


@needs_native
@fast
@given(st.integers(1, 6), st.integers(1, 2100), st.sampled_from([1, 5, 32, 128, 4096]), st.integers(0, 2**32 - 1))
def test_int4_to_float(rows: int, columns: int, group_size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    packed = rng.integers(-(2**31), 2**31, (rows, -(-columns // 8)), dtype=np.int32)
    scale = rng.integers(0, 0x7F80, (rows, -(-columns // group_size)), dtype=np.uint16)
    agree(lambda b: b.int4_to_float32(packed, scale, columns, group_size))
    agree(lambda b: b.int4_to_bf16(packed, scale, columns, group_size))


@needs_native
def test_casts_of_every_pattern() -> None:
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    agree(lambda b: b.bf16_to_float32(bits))
    lower = np.random.default_rng(0).integers(0, 1 << 16, 1 << 16, dtype=np.uint32)
    agree(lambda b: b.float32_to_bf16(((bits.astype(np.uint32) << 16) | lower).view(np.float32)))


@pytest.mark.usefixtures("each_backend")
def test_tiles_and_threads_give_the_bytes_of_one_call() -> None:
    import quantkit_kernels as kernels

    codes = fp8_codes(7, (300, 256))
    scales = scales_for(8, codes.shape, (128, 128))
    whole = kernels.fp8_to_int4(codes, scales, (128, 128), 64, "mse")
    starts = range(0, 300, 37)  # tiles that do not line up with blocks

    def tile(start: int) -> Int4Weight:
        return kernels.fp8_to_int4(
            codes[start : start + 37], scales, (128, 128), 64, "mse", row_offset=start
        )  # fmt: skip

    with ThreadPoolExecutor(4) as pool:
        tiles = list(pool.map(tile, starts))
    for name in ("packed", "scale", "error", "energy"):
        joined = np.concatenate([getattr(t, name) for t in tiles])
        assert joined.tobytes() == getattr(whole, name).tobytes(), name


@needs_native
def test_flush_to_zero_set_by_another_library_changes_nothing() -> None:
    weight = (spread(9, (4, 128)) * np.float32(1e-40)).astype(np.float32)
    expected = [outcome(lambda v=v: load(v).float_to_int4(weight, 0, 32, METHODS["mse"])) for v in LEVELS]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        flushed = [outcome(lambda v=v: load(v).float_to_int4(weight, 0, 32, METHODS["mse"])) for v in LEVELS]
        assert float(torch.tensor(1e-40) * 1) == 0.0  # still set after our calls
    finally:
        torch.set_flush_denormal(False)
    assert flushed == expected
