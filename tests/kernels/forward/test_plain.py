"""Linears over bfloat16 weights against float64, on every implementation; rows that depend on nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quantkit_kernels.forward.plain import plain_linear, plain_linears

from .made_up import activations

ROWS = (1, 2, 3, 4, 5, 8, 9, 33, 129)


def weights(seed: int, *shape: int) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.05).bfloat16()


def check(x: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
    x64, w64 = x.double().numpy(), weight.double().numpy()
    want, size = x64 @ w64.T, np.abs(x64) @ np.abs(w64).T
    y = plain_linear(x, weight, dtype=dtype)
    assert y.dtype is dtype
    error = np.abs(y.double().numpy() - want)
    rounding = 2.0**-8 * np.abs(want) * (1 + 2.0**-7) if dtype is torch.bfloat16 else 0.0
    assert (error <= (x.shape[-1] / 128 + 16) * 2.0**-24 * size + rounding).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("outputs, columns", [(1, 1), (7, 33), (67, 128), (300, 200), (129, 1408), (33, 2000)])
def test_matches_float64(each_implementation: str, outputs: int, columns: int, dtype: torch.dtype) -> None:
    weight = weights(outputs, outputs, columns)
    for rows in ROWS if outputs < 300 else (1, 67):
        check(activations(rows, rows, columns), weight, dtype)


def test_strides_and_leading_dimensions(each_implementation: str) -> None:
    weight, x = weights(1, 40, 300)[3:30, 10:210], activations(2, 6, 300)[:, 50:250]
    check(x, weight, torch.float32)
    y = plain_linear(x.reshape(2, 3, 200), weight)
    assert torch.equal(y.view(6, 27), plain_linear(x, weight))
    assert plain_linear(x[:0], weight).shape == (0, 27)
    assert torch.equal(plain_linear(x[:, :0], weight[:, :0]), torch.zeros(6, 27, dtype=torch.bfloat16))


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_products_are_those_of_one_by_one(each_implementation: str, rows: int) -> None:
    weight = weights(3, 5, 70, 200)
    contiguous = activations(4, rows * 5, 200).view(rows, 5, 200)
    for x in (
        contiguous,
        contiguous.transpose(0, 1).contiguous().transpose(0, 1),
        contiguous.repeat(1, 1, 2)[..., ::2],
    ):
        found = plain_linears(x, weight, dtype=torch.float32)
        one = torch.stack([plain_linear(x[:, b], weight[b], dtype=torch.float32) for b in range(5)], 1)
        assert torch.equal(found, one)
    transposed = weights(3, 5, 200, 70).transpose(1, 2)
    with pytest.raises(ValueError, match="weight must have contiguous rows"):
        plain_linears(contiguous, transposed)


@pytest.mark.parametrize("columns", [96, 512, 2000])
def test_a_row_does_not_depend_on_its_batch(each_implementation: str, columns: int) -> None:
    weight, x = weights(5, 77, columns), activations(6, 150, columns)
    alone = torch.cat([plain_linear(x[i : i + 1], weight, dtype=torch.float32) for i in range(150)])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for first, rows in ((0, 150), (3, 2), (7, 9), (20, 64), (1, 130)):
                part = slice(first, first + rows)
                assert torch.equal(plain_linear(x[part], weight, dtype=torch.float32), alone[part])
    finally:
        torch.set_num_threads(before)


def test_special_numbers_stay_in_their_row(each_implementation: str) -> None:
    weight, x = weights(7, 9, 130), activations(8, 12, 130)
    x[3, 129], x[5, 0] = torch.nan, torch.inf
    y = plain_linear(x, weight)
    assert y[3].isnan().all() and not y[5].isfinite().any()
    assert y[[0, 1, 2, 4, *range(6, 12)]].isfinite().all()


def test_wrong_arguments_are_named() -> None:
    weight, x = weights(9, 8, 64), activations(10, 2, 64)
    for call, error, named in (
        (lambda: plain_linear(x.float(), weight), TypeError, "x must be bfloat16"),
        (lambda: plain_linear(x, weight.float()), TypeError, "weight must be bfloat16"),
        (lambda: plain_linear(x[:, :32], weight), ValueError, "x must have 64 columns"),
        (lambda: plain_linear(x, weight, dtype=torch.float16), TypeError, "dtype must be"),
        (lambda: plain_linears(x[:, None], weight.expand(2, 8, 64)), ValueError, "x must be of shape"),
    ):
        with pytest.raises(error, match=named):
            call()


def test_no_columns_give_zeros(each_implementation: str) -> None:
    assert not plain_linear(activations(1, 2, 3, 0), weights(2, 4, 0)).any()
    assert plain_linear(activations(1, 2, 3, 0), weights(2, 4, 0)).shape == (2, 3, 4)
