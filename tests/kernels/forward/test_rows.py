"""Norms and rotary embeddings against float64 and the twin, on every implementation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quantkit_kernels.forward.rows import add, rms_norm, rotate
from quantkit_kernels.forward.twin import rows as twin

from .made_up import activations


def angles(seed: int, tokens: int, pairs: int) -> tuple[Tensor, Tensor]:
    angle = torch.randn(tokens, pairs, generator=torch.Generator().manual_seed(seed)) * 100
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("columns", [1, 7, 16, 33, 128, 1000])
def test_norms_match_float64(each_implementation: str, columns: int) -> None:
    for rows in (1, 3, 40):
        x = activations(rows, rows, columns + 5)[:, 5:]
        weight = torch.randn(columns, generator=torch.Generator().manual_seed(columns)).bfloat16().float()
        y = rms_norm(x, weight, 1e-5)
        x64 = x.double().numpy()
        want = x64 / np.sqrt(np.square(x64).mean(1, keepdims=True) + 1e-5) * weight.double().numpy()
        assert (np.abs(y.double().numpy() - want) <= 2.0**-7 * 1.01 * np.abs(want)).all()  # rounded twice
        assert torch.equal(y, torch.cat([rms_norm(row, weight, 1e-5) for row in x.split(1)]))


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("columns, pairs", [(2, 1), (64, 32), (48, 8), (33, 16), (128, 64), (7, 0)])
def test_rotations_have_the_twins_bits(
    each_implementation: str, columns: int, pairs: int, is_interleaved: bool
) -> None:
    for tokens, heads in ((1, 1), (5, 3), (130, 8)):
        x = activations(tokens, tokens, heads + 1, columns + 3)[:, 1:, 3:]
        cos, sin = angles(tokens, tokens, pairs)
        expected = x.new_empty(x.shape)
        twin.rotate(x, cos, sin, is_interleaved, expected)
        found = rotate(x, cos, sin, is_interleaved=is_interleaved)
        assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


def test_sums_have_torchs_bits(each_implementation: str) -> None:
    for shape in ((1, 1), (3, 33), (5, 7, 1000)):
        a, b = activations(1, *shape), activations(2, *shape)
        a.view(-1)[0], b.view(-1)[-1] = torch.inf, torch.nan
        assert torch.equal(add(a, b).nan_to_num(), (a + b).nan_to_num())
    x = activations(3, 8, 6)
    assert torch.equal(add(x.t(), x.t()), (x + x).t())


def test_a_rotation_turns_pairs(each_implementation: str) -> None:
    """By a right angle (x, y) becomes (-y, x); a plain loop says which columns are pairs."""
    x = torch.arange(1.0, 11.0).bfloat16().view(1, 1, 10)
    cos, sin = torch.zeros(1, 4), torch.ones(1, 4)
    assert rotate(x, cos, sin, is_interleaved=False).flatten().tolist() == [-5, -6, -7, -8, 1, 2, 3, 4, 9, 10]
    assert rotate(x, cos, sin, is_interleaved=True).flatten().tolist() == [-2, -4, -6, -8, 1, 3, 5, 7, 9, 10]


def test_special_numbers_stay_in_their_row(each_implementation: str) -> None:
    x = activations(1, 4, 20)
    x[1, 3], x[2, 19] = torch.nan, torch.inf
    y = rms_norm(x, torch.ones(20), 1e-6)
    assert y[1].isnan().all() and not y[2, 19].isfinite() and y[[0, 3]].isfinite().all()
    cos, sin = angles(2, 4, 10)
    z = rotate(x[:, None], cos, sin, is_interleaved=False)[:, 0]
    assert z[1, [3, 13]].isnan().all() and z[1].isnan().sum() == 2 and z[[0, 3]].isfinite().all()


def test_nothing_in_nothing_out(each_implementation: str) -> None:
    x = activations(1, 0, 8)
    assert rms_norm(x, torch.ones(8), 1e-6).shape == (0, 8)
    assert rotate(x[:, None], *angles(1, 0, 2), is_interleaved=True).shape == (0, 1, 8)


def test_wrong_arguments_are_named() -> None:
    x, (cos, sin) = activations(1, 4, 8), angles(1, 4, 2)
    for call, error, named in (
        (lambda: rms_norm(x.float(), torch.ones(8), 1e-6), TypeError, "x must be bfloat16"),
        (lambda: rms_norm(x, torch.ones(7), 1e-6), ValueError, "weight must be of shape"),
        (lambda: rms_norm(x, torch.ones(8).bfloat16(), 1e-6), TypeError, "weight must be float32"),
        (lambda: rms_norm(x, torch.ones(8), float("nan")), ValueError, "epsilon must be a finite"),
        (lambda: rms_norm(x, torch.ones(8), "1"), TypeError, "epsilon must be a number"),  # type: ignore[arg-type]
        (lambda: add(x, x[:2]), ValueError, "b must be of shape"),
        (lambda: add(x, x.float()), TypeError, "b must be bfloat16"),
        (lambda: rotate(x, cos, sin, is_interleaved=True), ValueError, "x must have 3 dimensions"),
        (lambda: rotate(x[:, None], cos[:3], sin, is_interleaved=True), ValueError, "cos must be of shape"),
        (lambda: rotate(x[:, None], cos, sin[:, :1], is_interleaved=True), ValueError, "sin must be of shape"),
        (lambda: rotate(x[:, None], *angles(1, 4, 5), is_interleaved=True), ValueError, "cos has 5 pairs"),
        (lambda: rotate(x.t()[:, None], *angles(1, 8, 1), is_interleaved=True), ValueError, "contiguous columns"),
    ):
        with pytest.raises(error, match=named):
            call()
