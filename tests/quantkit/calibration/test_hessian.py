"""Hessians: sums, kept tokens, shrinkage, determinism, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantkit.calibration import Hessian
from quantkit.calibration.hessian import MICRO_BATCH
from quantkit.errors import SourceError, UsageError
from tests.quantkit.calibration import cases


def gram(x: torch.Tensor) -> np.ndarray:
    result: np.ndarray = x.double().numpy().T @ x.double().numpy()
    return result


@pytest.mark.parametrize("tokens", [0, 1, 16, 17, 511, 512, 513, 1300])
@pytest.mark.parametrize("keep", [None, 0, 10_000])
def test_sum_of_outer_products(tokens: int, keep: int | None) -> None:
    x = cases.inputs(1, tokens, 64)
    h = cases.hessian(x, keep)
    tolerance = {"rtol": 1e-4, "atol": 1e-3}
    np.testing.assert_allclose(h.dense().numpy(), gram(x), **tolerance)
    np.testing.assert_allclose(h.diagonal().numpy(), np.diag(gram(x)), **tolerance)
    e = torch.from_numpy(cases.weight(2, 9, 64))
    expected = np.square(e.double().numpy() @ x.double().numpy().T).sum(1)
    np.testing.assert_allclose(h.norms(e).numpy(), expected, rtol=1e-4)
    assert h.tokens == tokens
    assert (h.rows is not None) == (tokens <= (16 if keep is None else keep))


@pytest.mark.parametrize("keep", [None, 10_000])
def test_pieces_do_not_change_a_bit(keep: int | None) -> None:
    x = cases.inputs(3, 3 * MICRO_BATCH + 77, 32)
    whole = cases.hessian(x, keep)
    for size in (1000, 513, 64, 7):
        parts = Hessian(32, where="x", keep_tokens=keep)
        for start in range(0, x.shape[0], size):
            parts.add(x[start : start + size])
        assert torch.equal(parts.dense(), whole.dense()), size


def test_added_tokens_are_a_copy() -> None:
    x = cases.inputs(4, 5, 64)
    h = cases.hessian(x)
    before = h.dense()
    x.zero_()
    assert torch.equal(h.dense(), before)


def test_counts_weigh_tokens() -> None:
    x, counts = cases.inputs(5, 100, 32), torch.rand(100)
    h = Hessian(32, where="x")
    h.add(x, counts)
    expected = (x.double().numpy().T * counts.double().numpy()) @ x.double().numpy()
    np.testing.assert_allclose(h.dense().numpy(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("keep", [0, 10_000])
@pytest.mark.parametrize("own", [0, 1, 2, 60])
def test_shrinkage_is_the_documented_formula(own: int, keep: int) -> None:
    x, layer = cases.inputs(6, own, 64), cases.inputs(7, 500, 64)
    mixed = cases.hessian(x, keep).shrunk(cases.hessian(layer, keep), 100)
    expected = gram(x) + (100 - own) / 500 * gram(layer)
    np.testing.assert_allclose(mixed.dense().numpy(), expected, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(mixed.diagonal().numpy(), np.diag(expected), rtol=1e-4)
    e = torch.from_numpy(cases.weight(8, 9, 64))
    np.testing.assert_allclose(
        mixed.norms(e).numpy(), np.einsum("oi,ij,oj->o", *(e.double(), expected, e.double())), rtol=1e-4
    )
    assert mixed.tokens == own  # what the expert saw, not what was made up
    assert (mixed.rows is not None) == (keep > 0)


def test_enough_tokens_are_not_shrunk() -> None:
    h = cases.hessian(cases.inputs(9, 100, 32))
    assert h.shrunk(cases.hessian(cases.inputs(10, 9, 32)), 100) is h


def test_average_that_does_not_fit() -> None:
    h = cases.hessian(cases.inputs(11, 1, 32))
    for average in (Hessian(32, where="x"), cases.hessian(cases.inputs(1, 5, 64))):
        with pytest.raises(UsageError, match="expert 3 gate_proj: average of"):
            h.shrunk(average, 10)


@pytest.mark.parametrize("keep", [0, 10_000])
def test_scaled(keep: int) -> None:
    x, factors = cases.inputs(12, 600, 32), torch.rand(32) + 0.5
    h = cases.hessian(x, keep)
    np.testing.assert_allclose(h.scaled(factors).dense().numpy(), gram(x * factors), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(h.dense().numpy(), gram(x), rtol=1e-4, atol=1e-3)  # unchanged


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_bad_activations_name_linear_token_and_column(value: float) -> None:
    h = cases.hessian(cases.inputs(13, 7, 32))
    x = cases.inputs(14, 5, 32)
    x[2, 9] = value
    with pytest.raises(SourceError, match=rf"expert 3 gate_proj: input of token 9 is {value} in column 9"):
        h.add(x)
    assert h.tokens == 7


def test_what_does_not_fit_is_refused() -> None:
    h = Hessian(32, where="here")
    for x, counts in ((torch.ones(4, 31), None), (torch.ones(32), None), (torch.ones(4, 32), torch.ones(3))):
        with pytest.raises(UsageError, match="here"):
            h.add(x, counts)
    with pytest.raises(SourceError, match="here"):
        h.add(torch.ones(4, 32), torch.full((4,), -1.0))
    with pytest.raises(UsageError):
        Hessian(0, where="x")


def ledoit_wolf(x: np.ndarray) -> float:
    """The paper's estimate, token by token in float64, with n - 1; the mean is known to be zero."""
    n, p = x.shape
    if n == 1:
        return 1.0
    s = x.T @ x / n
    delta = ((s - np.trace(s) / p * np.eye(p)) ** 2).sum()
    beta = sum(((np.outer(row, row) - s) ** 2).sum() for row in x) / (n * (n - 1))
    return float(min(beta, delta) / delta)


@pytest.mark.parametrize("keep", [0, 1000])
@pytest.mark.parametrize("tokens", [1, 2, 30, 700])
def test_shrinkage_is_that_of_the_paper(tokens: int, keep: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 24, generator=generator) * torch.linspace(0.1, 3, 24)
    counts = torch.rand(tokens, generator=generator)
    h = Hessian(24, where="test", keep_tokens=keep)
    for part in range(0, tokens, 100):
        h.add(x[part : part + 100], counts[part : part + 100])
    expected = ledoit_wolf((x * counts.sqrt().unsqueeze(1)).double().numpy())
    assert shrinkage(h) == pytest.approx(expected, rel=1e-3)
    assert shrinkage(h.scaled(torch.full((24,), 2.0))) == pytest.approx(expected, rel=1e-3)


def shrinkage(h: Hessian) -> float:
    return h.shrinkage(h.dense() if h.rows is None else h.rows @ h.rows.T)


def test_shrinkage_of_a_starved_hessian_counts_what_it_borrowed() -> None:
    x, others = cases.inputs(40, 5, 24), cases.inputs(41, 40, 24)
    mixed = cases.hessian(x).shrunk(cases.hessian(others), 25)  # 40 tokens stand for 20
    expected = ledoit_wolf(torch.cat([x, others * 0.5**0.5]).double().numpy())
    assert shrinkage(mixed) == pytest.approx(expected, rel=1e-3)
    assert cases.hessian(torch.zeros(3, 24)).shrinkage(torch.zeros(24, 24)) == 1.0
