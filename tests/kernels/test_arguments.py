"""What the operations accept, and the one clear error for everything else."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import quantkit_kernels as kernels
from quantkit_kernels.arrays import matrix

from .weights import bf16, fp8_codes, scales_for, spread

pytestmark = pytest.mark.usefixtures("each_backend")
CODES = fp8_codes(0, (200, 256))
SCALES = scales_for(1, CODES.shape, (128, 128))
BLOCK = (128, 128)
LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "row stride": lambda a: np.pad(a, ((0, 0), (0, 5)))[:, : a.shape[1]],
    "every second row": lambda a: np.repeat(a, 2, axis=0)[::2],
    "rows reversed": lambda a: a[::-1].copy()[::-1],
    "Fortran order": np.asfortranarray,
    "every second column": lambda a: np.repeat(a, 2, axis=1)[:, ::2],
    "one row, repeated": lambda a: np.broadcast_to(a[:1], a.shape),
    "unaligned": lambda a: np.frombuffer(b"x" + a.tobytes(), np.uint8)[1:].view(a.dtype).reshape(a.shape),
    "read-only": lambda a: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_gives_the_bytes_of_the_plain_one(layout: str) -> None:
    arrange = LAYOUTS[layout]
    tidy = [np.ascontiguousarray(arrange(a)) for a in (CODES, SCALES)]
    odd = [arrange(a) for a in (CODES, SCALES)]
    assert kernels.fp8_to_bf16(*odd, BLOCK).tobytes() == kernels.fp8_to_bf16(*tidy, BLOCK).tobytes()
    one, two = (kernels.fp8_to_int4(*a, BLOCK, 32, "rtn") for a in (odd, tidy))
    assert one.packed.tobytes() == two.packed.tobytes() and one.scale.tobytes() == two.scale.tobytes()
    packed, scale = arrange(one.packed), arrange(one.scale)
    plain = kernels.int4_to_float32(np.ascontiguousarray(packed), np.ascontiguousarray(scale), 256)
    assert kernels.int4_to_float32(packed, scale, 256).tobytes() == plain.tobytes()
    for weight in (spread(2, (64, 256)), bf16(spread(2, (64, 256)))):
        expected = kernels.float_to_fp8(np.ascontiguousarray(arrange(weight)))
        got = kernels.float_to_fp8(arrange(weight))
        assert [g.tobytes() for g in got] == [e.tobytes() for e in expected]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_backends_get_aligned_rows(layout: str) -> None:
    got = matrix("scales", LAYOUTS[layout](SCALES), np.float32)
    assert got.flags.aligned and got.strides[1] == 4 and got.strides[0] >= 0 and got.strides[0] % 4 == 0
    assert np.array_equal(got, LAYOUTS[layout](SCALES))


def test_float16_is_widened() -> None:
    half = spread(3, (4, 64)).clip(-1e4, 1e4).astype(np.float16)
    got, expected = (kernels.float_to_int4(w, 32, "mse") for w in (half, half.astype(np.float32)))
    assert got.packed.tobytes() == expected.packed.tobytes()


@pytest.mark.parametrize("shape", [(0, 0), (0, 128), (3, 0)])
def test_empty_weights(shape: tuple[int, int]) -> None:
    codes, scales = np.zeros(shape, np.uint8), np.zeros((-(-shape[0] // 128), -(-shape[1] // 128)), np.float32)
    assert kernels.fp8_to_bf16(codes, scales, BLOCK).shape == shape
    result = kernels.fp8_to_int4(codes, scales, BLOCK, 32)
    assert result.packed.shape == (shape[0], shape[1] // 8) and result.scale.shape == (shape[0], shape[1] // 32)
    assert kernels.int4_to_bf16(result.packed, result.scale, shape[1]).shape == shape
    assert kernels.float_to_fp8(np.zeros(shape, np.float32))[1].shape == scales.shape
    assert kernels.float32_to_bf16(np.zeros(shape, np.float32)).shape == shape


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("at", [(0, 0), (130, 255), (199, 31)])
def test_nan_code_is_refused_with_its_position(code: int, at: tuple[int, int]) -> None:
    codes = CODES.copy()
    codes[at] = code
    codes[199, 255] = code  # a later one
    calls: list[Callable[[], Any]] = [
        lambda: kernels.fp8_to_float32(codes, SCALES, BLOCK),
        lambda: kernels.fp8_to_bf16(codes, SCALES, BLOCK),
        lambda: kernels.fp8_to_int4(codes, SCALES, BLOCK, 32, "rtn"),
    ]
    for call in calls:
        with pytest.raises(kernels.NanCodeError, match=f"row {at[0]}, column {at[1]}") as caught:
            call()
        assert (caught.value.row, caught.value.column) == at
    clone = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(clone, kernels.NanCodeError) and clone.row == at[0] and str(clone) == str(caught.value)


def test_positions_count_from_the_top_of_the_whole_weight() -> None:
    tile = CODES[150:180].copy()
    tile[3, 7] = 0x7F
    with pytest.raises(kernels.NanCodeError) as caught:
        kernels.fp8_to_int4(tile, SCALES, BLOCK, 32, row_offset=150)
    assert (caught.value.row, caught.value.column) == (153, 7)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_weights_are_refused_with_their_position(value: float) -> None:
    weight = spread(4, (5, 2176))
    weight[2, 2100] = weight[4, 0] = value
    for source in (weight, (weight.view(np.uint32) >> 16).astype(np.uint16)):
        for call in (lambda s: kernels.float_to_int4(s, 64, "mse"), lambda s: kernels.float_to_fp8(s)):
            with pytest.raises(kernels.NonFiniteError, match="row 2, column 2100"):
                call(source)


def test_scale_that_makes_the_product_non_finite() -> None:
    codes = CODES.copy()
    codes[:, 0] = 0x7E  # 448
    scales = SCALES.copy()
    scales[1, 0] = np.float32(3e38)
    with pytest.raises(kernels.NonFiniteError, match="row 128, column 0"):
        kernels.fp8_to_int4(codes, scales, BLOCK, 32)
    scales[1, 0] = np.nan
    with pytest.raises(kernels.NonFiniteError, match="row 128, column 0"):
        kernels.fp8_to_int4(codes, scales, BLOCK, 32)
    assert np.isnan(kernels.fp8_to_float32(codes, scales, BLOCK)[128:, :128]).all()
    assert np.isnan(kernels.bf16_to_float32(kernels.fp8_to_bf16(codes, scales, BLOCK))[128:, :128]).all()


def test_group_too_small_for_a_bf16_scale_stores_zeros() -> None:
    weight = np.full((1, 64), 1e-41, np.float32)  # 1e-41 / 7.5 is below half the smallest bf16
    weight[0, 32:] = 1e-39  # this one is not
    for method in ("rtn", "mse"):
        got = kernels.float_to_int4(weight, 32, method)
        back = kernels.int4_to_float32(got.packed, got.scale, 64)
        assert got.scale[0, 0] == 0x3C00 and not back[0, :32].any()
        assert 0 < got.scale[0, 1] < 0x80 and back[0, 32:].all()


def test_a_nan_int4_scale_does_not_crash() -> None:
    packed, scale = np.zeros((1, 4), np.int32), np.array([[0x7FC0]], np.uint16)
    assert np.isnan(kernels.int4_to_float32(packed, scale, 32)).all()
    assert np.isnan(kernels.bf16_to_float32(kernels.int4_to_bf16(packed, scale, 32))).all()


BAD_CALLS: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "group size": (ValueError, "32, 64, 128, got 16", lambda: kernels.fp8_to_int4(CODES, SCALES, BLOCK, 16)),
    "columns": (
        ValueError,
        "224 columns are not divisible by group_size 64.*fit: 32",
        lambda: kernels.float_to_int4(spread(0, (2, 224)), 64),
    ),
    "method": (
        ValueError,
        "'best'; known: rtn, mse",
        lambda: kernels.fp8_to_int4(CODES, SCALES, BLOCK, 32, "best"),
    ),
    "scale rows": (ValueError, r"need \[2, 2\]", lambda: kernels.fp8_to_bf16(CODES, SCALES[:1], BLOCK)),
    "scale columns": (ValueError, "scales of shape", lambda: kernels.fp8_to_bf16(CODES, SCALES[:, :1], BLOCK)),
    "too few for offset": (
        ValueError,
        "row_offset 128",
        lambda: kernels.fp8_to_bf16(CODES, SCALES, BLOCK, row_offset=128),
    ),
    "offset": (ValueError, "row_offset must be", lambda: kernels.fp8_to_bf16(CODES, SCALES, BLOCK, row_offset=-1)),
    "block": (ValueError, "block must be at least 1", lambda: kernels.fp8_to_bf16(CODES, SCALES, (0, 128))),
    "codes dtype": (
        TypeError,
        "codes must be a numpy array of uint8",
        lambda: kernels.fp8_to_bf16(SCALES, SCALES, BLOCK),
    ),
    "scale dtype": (
        TypeError,
        "scales must be a numpy array of float32, got float64",
        lambda: kernels.fp8_to_bf16(CODES, SCALES.astype(float), BLOCK),
    ),
    "not an array": (TypeError, "numpy array of .* got list", lambda: kernels.float_to_fp8([[1.0]])),  # type: ignore[arg-type]
    "dimensions": (ValueError, "two dimensions", lambda: kernels.float_to_fp8(np.zeros(4, np.float32))),
    "words": (
        ValueError,
        "33 columns need 5 words",
        lambda: kernels.int4_to_bf16(np.zeros((1, 4), np.int32), np.zeros((1, 1), np.uint16), 33),
    ),
    "groups": (
        ValueError,
        "do not divide into 3 groups",
        lambda: kernels.int4_to_bf16(np.zeros((1, 4), np.int32), np.zeros((1, 3), np.uint16), 32),
    ),
    "rows": (
        ValueError,
        "packed has 1 rows, scale has 2",
        lambda: kernels.int4_to_bf16(np.zeros((1, 4), np.int32), np.zeros((2, 1), np.uint16), 32),
    ),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_arguments(case: str) -> None:
    kind, message, call = BAD_CALLS[case]
    with pytest.raises(kind, match=message):
        call()


def test_errors_can_be_copied() -> None:
    error = kernels.NonFiniteError(3, 4)
    assert str(copy.copy(error)) == str(error) == "weight is NaN or infinite at row 3, column 4"


@pytest.mark.parametrize(
    ("importance", "problem"),
    [
        (np.ones(64, np.float64), "numpy array of float32"),
        (np.ones(32, np.float32), r"shape \[64\]"),
        (np.full(64, -1, np.float32), "not negative"),
        (np.full(64, np.nan, np.float32), "finite"),
    ],
)
def test_importance_that_does_not_fit(importance: np.ndarray, problem: str) -> None:
    with pytest.raises((TypeError, ValueError), match=problem):
        kernels.float_to_int4(np.ones((2, 64), np.float32), 32, importance=importance)


def test_integers_are_neither_cut_nor_wrapped() -> None:
    """In native code 2^64 is 0, by which it would divide."""
    weight, packed = spread(1, (4, 64)), np.zeros((4, 8), np.int32)
    scale = np.zeros((4, 1), np.uint16)
    for block in ((2**64, 2**64), (2**63, 128), (0, 1), (1, -1)):
        for call in (
            lambda b: kernels.fp8_to_bf16(CODES, SCALES[:1, :1], b),
            lambda b: kernels.float_to_fp8(weight, b),
        ):
            with pytest.raises(ValueError, match="block must be at least 1 and at most"):
                call(block)
    for wrong in ((128.5, 128), ("128", 128), (True, 128), 128, None, (128,), (1, 2, 3)):
        with pytest.raises(TypeError, match="block must be"):
            kernels.fp8_to_bf16(CODES, SCALES, wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="row_offset must be"):
        kernels.fp8_to_bf16(CODES, SCALES[:1], (2**60, 128), row_offset=2**64)
    for bad in (1.5, "1", False):
        with pytest.raises(TypeError, match="row_offset must be an integer"):
            kernels.fp8_to_bf16(CODES, SCALES, BLOCK, row_offset=bad)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="row_offset must be an integer"):
            kernels.float_to_int4(weight, 32, row_offset=bad)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="columns must be an integer"):
            kernels.int4_to_bf16(packed, scale, bad)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="group_size must be an integer"):
            kernels.int4_to_bf16(packed, scale, 64, group_size=bad)  # type: ignore[arg-type]
    for group_size in (2**63, 2**64):
        with pytest.raises(ValueError, match="group_size must be"):
            kernels.int4_to_bf16(packed, scale, 64, group_size=group_size)
    with pytest.raises(TypeError, match="group_size must be an integer"):
        kernels.float_to_int4(weight, 32.0)  # type: ignore[arg-type]
    assert kernels.float_to_fp8(weight, (2**62, 2**62))[1].shape == (1, 1)
    assert kernels.int4_to_bf16(packed, scale, 64, group_size=2**62).shape == (4, 64)


def test_other_byte_orders_are_copied() -> None:
    weight = spread(1, (4, 64)).clip(-1e4, 1e4)
    for swapped in (weight.astype(">f4"), weight.astype(">f2")):
        plain = swapped.astype(swapped.dtype.newbyteorder("="))
        assert kernels.float_to_fp8(swapped)[0].tobytes() == kernels.float_to_fp8(plain)[0].tobytes()
    bits = np.arange(100, dtype=np.uint16)
    assert kernels.bf16_to_float32(bits.astype(">u2")).tobytes() == kernels.bf16_to_float32(bits).tobytes()


def test_masks_are_not_ignored() -> None:
    hidden = np.ma.masked_array(spread(1, (4, 64)), mask=True)
    for call in (lambda: kernels.float_to_int4(hidden, 32), lambda: kernels.float32_to_bf16(hidden)):
        with pytest.raises(TypeError, match="must be a plain array, got a masked one"):
            call()


def test_counts_share_no_memory_with_the_weight() -> None:
    room = np.zeros(1024, np.int64)
    with pytest.raises(ValueError, match="counts shares memory"):
        kernels.fp8_to_int4(room.view(np.uint8).reshape(32, 256), SCALES[:1], BLOCK, 32, counts=room[:16])
