"""GPTQ against the paper's loops, its guarantees, and inputs that break it."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

import quantkit_kernels as kernels
from quantkit.calibration import GptqSettings, Hessian, gptq
from quantkit.calibration import factor as factors
from quantkit.errors import SourceError, UsageError
from tests.quantkit.calibration import cases

NO_FLOORS = ()
BOTH = ("rtn", "mse")


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("group_size", [32, 128])
@pytest.mark.parametrize(
    ("tokens", "columns", "form"),
    [(700, 256, "dense"), (64, 256, "low-rank"), (5, 384, "low-rank"), (300, 384, "dense"), (90, 640, "low-rank")],
)
def test_codes_of_the_paper(tokens: int, columns: int, form: str, group_size: int, act_order: bool) -> None:
    x, w = cases.inputs(1, tokens, columns), cases.weight(2, 48, columns)
    settings = GptqSettings(group_size=group_size, act_order=act_order, floors=NO_FLOORS, shrink=False)
    (got,) = gptq([w], cases.hessian(x), settings)
    h = x.double().numpy().T @ x.double().numpy()
    energy = np.diag(h).copy()
    damped = h + 0.01 * energy.mean() * np.eye(columns)
    order = np.argsort(-energy, kind="stable") if act_order else np.arange(columns)
    scale = np.repeat(kernels.bf16_to_float32(got.weight.scale), group_size, axis=1)
    expected = cases.paper_gptq(w, scale, damped, order)
    assert got.form == form
    assert np.array_equal(cases.codes(got.weight), expected)
    back = w - expected * scale.astype(np.float64)
    np.testing.assert_allclose(got.hessian_error, np.square(back @ x.double().numpy().T).sum(), rtol=1e-4)
    grouped = np.square(back).reshape(48, -1, group_size).sum(-1)
    np.testing.assert_allclose(got.weight.error, grouped, rtol=1e-5)


def test_scales_are_the_search_by_the_damped_diagonal() -> None:
    x, w = cases.inputs(3, 400, 256), cases.weight(4, 16, 256)
    h = cases.hessian(x)
    (got,) = gptq([w], h, GptqSettings(floors=NO_FLOORS, shrink=False))
    energy = np.square(x.double().numpy()).sum(0)
    importance = (energy + 0.01 * energy.mean()).astype(np.float32)
    expected = kernels.float_to_int4(w, 32, "mse", importance=importance)
    assert (got.weight.scale == expected.scale).mean() > 0.99  # the float32 sum may decide a tie otherwise
    assert got.weight.energy.tobytes() == expected.energy.tobytes()


def test_errors_have_the_bits_of_the_kernels() -> None:
    x, w = cases.inputs(5, 400, 256), cases.weight(6, 16, 256)
    (got,) = gptq([w], cases.hessian(x), GptqSettings(floors=NO_FLOORS))
    back = kernels.int4_to_float32(got.weight.packed, got.weight.scale, 256)
    square = np.square(w - back).reshape(16, 8, 32)
    while square.shape[-1] > 1:
        half = square.shape[-1] // 2
        square = square[..., :half] + square[..., half:]
    assert got.weight.error.tobytes() == square[..., 0].tobytes()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 60, 300, 2000])
def test_never_worse_than_rounding_in_the_hessian_norm(tokens: int, seed: int) -> None:
    x, w = cases.inputs(seed, tokens, 256), cases.weight(100 + seed, 24, 256)
    (got,) = gptq([w], cases.hessian(x), GptqSettings(group_size=(32, 64, 128)[seed % 3], floors=BOTH))
    ours = cases.norms(w, got.weight, x)
    for method in ("rtn", "mse"):
        other = cases.norms(w, kernels.float_to_int4(w, (32, 64, 128)[seed % 3], method), x)
        assert (ours <= other * (1 + 1e-4) + 1e-9).all(), method  # every row, not only the sum
        np.testing.assert_allclose(got.floor_errors[method], other.sum(), rtol=1e-4)
        assert got.hessian_error <= got.floor_errors[method]
    np.testing.assert_allclose(got.hessian_error, ours.sum(), rtol=1e-3, atol=1e-9)
    assert got.tokens == tokens


def test_floors_take_over_where_the_sweep_is_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("quantkit.calibration.gptq")  # the package's gptq is the function
    x, w = cases.inputs(7, 300, 128), cases.weight(8, 12, 128)
    original = module._swept

    def spoiled(*args: object) -> object:
        found, norms = original(*args)  # type: ignore[arg-type]
        found.packed[3:5] = 0
        norms[3:5] = 1e9
        return found, norms

    monkeypatch.setattr(module, "_swept", spoiled)
    (got,) = gptq([w], cases.hessian(x), GptqSettings(floors=BOTH))
    assert got.rows_from_floor == 2
    ours = cases.norms(w, got.weight, x)
    rtn, mse = (cases.norms(w, kernels.float_to_int4(w, 32, m), x) for m in ("rtn", "mse"))
    np.testing.assert_allclose(ours[3:5], np.minimum(rtn, mse)[3:5])


@pytest.mark.parametrize("tokens", [40, 500])
def test_gate_and_up_together_are_gate_and_up_apart(tokens: int) -> None:
    x, gate, up = cases.inputs(9, tokens, 256), cases.weight(10, 24, 256), cases.weight(11, 40, 256)
    h = cases.hessian(x)
    together = gptq([gate, up], h)
    for w, got in zip((gate, up), together, strict=True):
        (alone,) = gptq([w], h)
        assert (cases.codes(got.weight) == cases.codes(alone.weight)).mean() > 0.999
        np.testing.assert_allclose(got.hessian_error, alone.hessian_error, rtol=1e-3)


def test_low_rank_form_gives_the_codes_of_the_dense_form() -> None:
    x, w = cases.inputs(12, 100, 1024), cases.weight(13, 32, 1024)
    x[:, 5] *= 100  # an outlier channel, as real activations have
    low, dense = (gptq([w], cases.hessian(x, keep), GptqSettings(floors=NO_FLOORS))[0] for keep in (None, 0))
    assert (low.form, dense.form) == ("low-rank", "dense")
    assert (cases.codes(low.weight) == cases.codes(dense.weight)).mean() > 0.995
    np.testing.assert_allclose(low.hessian_error, dense.hessian_error, rtol=0.02)


def singular(kind: str, tokens: int) -> torch.Tensor:
    x = cases.inputs(14, tokens, 256)
    if kind == "duplicate columns":
        x[:, 128:] = x[:, :128]
    elif kind == "zero columns":
        x[:, ::3] = 0
        x[:, 64:96] = 0  # a whole group
    elif kind == "one direction":
        x = x[:, :1] * x[:1]
    return x


@pytest.mark.parametrize("tokens", [1, 2, 50, 600])
@pytest.mark.parametrize("kind", ["duplicate columns", "zero columns", "one direction"])
def test_singular_hessian(kind: str, tokens: int) -> None:
    x, w = singular(kind, tokens), cases.weight(15, 16, 256)
    (got,) = gptq([w], cases.hessian(x), GptqSettings(floors=BOTH))
    back = kernels.int4_to_float32(got.weight.packed, got.weight.scale, 256)
    assert np.isfinite(back).all() and np.isfinite(got.hessian_error)
    for method in ("rtn", "mse"):
        other = cases.norms(w, kernels.float_to_int4(w, 32, method), x)
        assert (cases.norms(w, got.weight, x) <= other * (1 + 1e-3) + 1e-6 * other.mean()).all()
    if kind == "zero columns":  # columns that see nothing are still quantized well, not zeroed
        dead = slice(64, 96)
        assert np.abs(w[:, dead] - back[:, dead]).max() <= np.abs(w[:, dead]).max() / 7


@pytest.mark.parametrize("x", [torch.zeros(0, 128), torch.zeros(9, 128)])
def test_without_inputs_it_is_plain_rounding_and_says_so(x: torch.Tensor) -> None:
    w = cases.weight(16, 8, 128)
    (got,) = gptq([w], cases.hessian(x))
    assert got.form == "none" and got.hessian_error == 0
    assert got.weight.packed.tobytes() == kernels.float_to_int4(w, 32, "mse").packed.tobytes()


def test_dampening_is_raised_in_steps_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    original, refused = factors._upper, []

    def stubborn(matrix: torch.Tensor) -> torch.Tensor:
        if len(refused) < 2:
            refused.append(1)
            raise factors.NotPositiveError
        return original(matrix)

    monkeypatch.setattr(factors, "_upper", stubborn)
    (got,) = gptq(
        [cases.weight(17, 8, 128)], cases.hessian(cases.inputs(18, 300, 128)), GptqSettings(shrink=False)
    )
    assert got.attempts == 3
    assert got.percdamp == pytest.approx(1.0)


def test_hessian_that_stays_singular_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    h = cases.hessian(cases.inputs(19, 300, 128))
    monkeypatch.setattr(h, "dense", lambda: 3 * torch.eye(128) - torch.ones(128, 128))  # not positive definite
    with pytest.raises(SourceError, match=r"expert 3 gate_proj: Hessian of 300 tokens .* dampening 0.1"):
        gptq([cases.weight(20, 8, 128)], h, GptqSettings(max_percdamp=0.1, shrink=False))


@pytest.mark.parametrize("tokens", [30, 600])
def test_the_same_bytes_every_time(tokens: int) -> None:
    x, w = cases.inputs(21, tokens, 256), cases.weight(22, 64, 256)
    first, second = (gptq([w], cases.hessian(x))[0] for _ in range(2))
    assert first.weight.packed.tobytes() == second.weight.packed.tobytes()
    assert first.hessian_error == second.hessian_error


def test_what_does_not_fit_is_refused() -> None:
    h = cases.hessian(cases.inputs(23, 10, 128))
    for wrong in ([], [cases.weight(1, 4, 256)], [cases.weight(1, 4, 128).astype(np.float64)]):
        with pytest.raises(UsageError, match="expert 3 gate_proj"):
            gptq(wrong, h)
    with pytest.raises(ValueError, match="not divisible by group_size"):
        gptq([cases.weight(1, 4, 96)], Hessian(96, where="x"), GptqSettings(group_size=64))
    bad = cases.weight(1, 4, 128)
    bad[2, 3] = np.nan
    with pytest.raises(kernels.NonFiniteError):
        gptq([bad], h)


@pytest.mark.parametrize("tokens", [20, 60, 200])
def test_few_tokens_are_not_fitted(tokens: int) -> None:
    """On tokens that were not seen: better than rounding, which a fixed percent of dampening is not."""
    w = cases.weight(30, 64, 256)
    directions = cases.inputs(31, 40, 256)
    seen, fresh = (
        cases.inputs(seed, n, 40) @ directions * 0.2 + cases.inputs(seed + 1, n, 256)
        for seed, n in ((32, tokens), (34, 4000))
    )
    errors = {
        shrink: cases.norms(w, gptq([w], cases.hessian(seen), GptqSettings(shrink=shrink))[0].weight, fresh).sum()
        for shrink in (True, False)
    }
    rtn = cases.norms(w, kernels.float_to_int4(w, 32, "rtn"), fresh).sum()
    assert errors[True] < errors[False] and errors[True] < rtn
