"""The AWQ fold: exact before quantization, no worse after it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import quantkit_kernels as kernels
from quantkit.calibration import GptqSettings, fold_expert, gptq, round_by_importance
from quantkit.errors import UsageError
from tests.quantkit.calibration import cases


def expert(
    x: torch.Tensor, gate: np.ndarray, up: np.ndarray, down: np.ndarray, dtype: torch.dtype
) -> torch.Tensor:
    g, u, d = (torch.from_numpy(w).to(dtype) for w in (gate, up, down))
    x = x.to(dtype)
    return (torch.nn.functional.silu(x @ g.T) * (x @ u.T)) @ d.T


def middle(x: torch.Tensor, gate: np.ndarray, up: np.ndarray) -> torch.Tensor:
    return torch.nn.functional.silu(x @ torch.from_numpy(gate).T) * (x @ torch.from_numpy(up).T)


@pytest.fixture
def parts() -> tuple[torch.Tensor, np.ndarray, np.ndarray, np.ndarray]:
    x = cases.inputs(1, 300, 128)
    gate, up, down = cases.weight(2, 256, 128) * 9, cases.weight(3, 256, 128), cases.weight(4, 128, 256)
    up *= np.exp(np.random.default_rng(5).normal(0, 1.5, (256, 1))).astype(np.float32)  # unequal inputs of down
    return x, gate, up, down


def test_the_fold_changes_nothing_before_quantization(parts: tuple) -> None:
    x, gate, up, down = parts
    fold = fold_expert(up, down, cases.hessian(middle(x, gate, up)))
    assert fold.alpha > 0 and fold.scale.max() / fold.scale.min() > 2  # it did fold
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.float64, 5e-8)):  # folded weights are float32
        before, after = (expert(x, gate, *w, dtype) for w in ((up, down), (fold.up, fold.down)))
        assert float((before - after).norm() / before.norm()) < tolerance
    assert np.array_equal(fold.down, down * fold.scale)
    assert np.array_equal(fold.up, up / fold.scale[:, None])


def test_the_fold_lowers_the_error_of_the_output(parts: tuple) -> None:
    x, gate, up, down = parts
    h = cases.hessian(middle(x, gate, up))
    fold = fold_expert(up, down, h)
    assert fold.error < fold.plain_error
    plain = kernels.float_to_int4(down, 32, "rtn")
    z = middle(x, gate, fold.up)
    (folded,) = round_by_importance([fold.down], h.scaled(1 / torch.from_numpy(fold.scale)))
    assert cases.norms(fold.down, folded.weight, z).sum() < cases.norms(down, plain, middle(x, gate, up)).sum()
    np.testing.assert_allclose(folded.hessian_error, cases.norms(fold.down, folded.weight, z).sum(), rtol=1e-3)
    (both,) = gptq([fold.down], h.scaled(1 / torch.from_numpy(fold.scale)))
    assert both.hessian_error < folded.hessian_error


def test_rounding_of_up_does_not_feel_the_fold(parts: tuple) -> None:
    _, _, up, _ = parts
    scale = np.float32(2.0) ** np.arange(256).reshape(-1, 1).astype(np.float32).clip(0, 20)
    before, after = (kernels.float_to_int4(w, 32, "mse") for w in (up, up * scale))
    assert before.packed.tobytes() == after.packed.tobytes()


@pytest.mark.parametrize("tokens", [0, 1, 2, 40, 800])
def test_rounding_by_importance_keeps_the_floors(tokens: int) -> None:
    x, w = cases.inputs(6, tokens, 256), cases.weight(7, 24, 256)
    (got,) = round_by_importance([w], cases.hessian(x), GptqSettings(group_size=64, floors=("rtn", "mse")))
    assert got.form == ("diagonal" if tokens else "none")
    for method in ("rtn", "mse"):
        other = cases.norms(w, kernels.float_to_int4(w, 64, method), x)
        assert (cases.norms(w, got.weight, x) <= other * (1 + 1e-4) + 1e-9).all()


@pytest.mark.parametrize("z", [torch.zeros(0, 128), torch.zeros(4, 128), torch.eye(128)[:1] * 3])
def test_inputs_that_say_little(z: torch.Tensor) -> None:
    up, down = cases.weight(8, 128, 64), cases.weight(9, 32, 128)
    fold = fold_expert(up, down, cases.hessian(z))
    assert np.isfinite(fold.up).all() and np.isfinite(fold.down).all() and (fold.scale > 0).all()
    if not z.any():
        assert fold.alpha == 0 and np.array_equal(fold.down, down)


@pytest.mark.parametrize("tokens", [0, 1, 2, 77])
@pytest.mark.parametrize(("inner", "hidden", "group_size"), [(32, 33, 32), (96, 7, 32), (320, 65, 64)])
def test_the_expert_computes_the_same_for_any_shape(tokens: int, inner: int, hidden: int, group_size: int) -> None:
    """Inputs of down that are always zero, ones 1e6 times larger than others, few tokens or none."""
    gate, up, down = cases.weight(2, inner, hidden), cases.weight(3, inner, hidden), cases.weight(4, hidden, inner)
    gate[::5] = up[1::7] = 0
    up[2::9] *= 1e6
    x = cases.inputs(5, tokens, hidden)
    fold = fold_expert(up, down, cases.hessian(middle(x, gate, up)), GptqSettings(group_size=group_size))
    probe = cases.inputs(6, 20, hidden)  # other tokens than it was chosen by
    for dtype in (torch.float32, torch.float64):
        before, after = (expert(probe, gate, *w, dtype) for w in ((up, down), (fold.up, fold.down)))
        assert float((before - after).norm() / before.norm()) < 1e-6
    assert (fold.scale > 0).all() and np.isfinite(fold.scale).all()
    assert tokens or fold.alpha == 0


def test_shapes_that_do_not_belong_together() -> None:
    with pytest.raises(UsageError, match=r"up of shape \[64, 64\]"):
        fold_expert(cases.weight(1, 64, 64), cases.weight(1, 32, 128), cases.hessian(torch.ones(1, 128)))
