"""The histogram of INT4 codes that a conversion adds up on the way."""

from __future__ import annotations

import numpy as np
import pytest

import quantkit_kernels as kernels

from .weights import fp8_codes, scales_for, spread

pytestmark = pytest.mark.usefixtures("each_backend")


def counted(packed: np.ndarray) -> np.ndarray:
    nibbles = (packed.view(np.uint32).reshape(-1, 1) >> np.arange(0, 32, 4, dtype=np.uint32)) & 15
    return np.array([(nibbles == code).sum() for code in range(16)])


@pytest.mark.parametrize("method", ["rtn", "mse"])
@pytest.mark.parametrize(("rows", "columns"), [(0, 64), (1, 32), (7, 96), (33, 2048 + 64), (5, 5 * 32)])
def test_counts_are_added_and_change_nothing(method: str, rows: int, columns: int) -> None:
    codes = fp8_codes(1, (rows, columns))
    scales = scales_for(2, codes.shape, (128, 128))
    counts = np.arange(16)
    with_counts = kernels.fp8_to_int4(codes, scales, (128, 128), 32, method, counts=counts)
    without = kernels.fp8_to_int4(codes, scales, (128, 128), 32, method)
    assert with_counts.packed.tobytes() == without.packed.tobytes()
    assert np.array_equal(counts - np.arange(16), counted(without.packed))

    weight, counts = spread(3, (rows, columns)), np.zeros(16, np.int64)
    made = kernels.float_to_int4(weight, 32, method, importance=np.ones(columns, np.float32), counts=counts)
    assert np.array_equal(counts, counted(made.packed)) and counts.sum() == weight.size


@pytest.mark.parametrize(
    ("counts", "error", "message"),
    [
        (np.zeros(16, np.int32), TypeError, "counts must be a numpy array of int64, got int32"),
        ([0] * 16, TypeError, "counts must be a numpy array of int64, got list"),
        (np.zeros(15, np.int64), ValueError, r"counts must be of shape \[16\], got \[15\]"),
        (np.zeros(32, np.int64)[::2], ValueError, "counts must be contiguous"),
        (np.broadcast_to(np.int64(0), 16), ValueError, "counts must be contiguous"),
    ],
)
def test_wrong_counts_are_refused(counts: np.ndarray, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kernels.float_to_int4(np.ones((1, 32), np.float32), 32, counts=counts)
