"""Retries under the quality budget: which tries, in which order, and what each one is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import quantkit_kernels as kernels
from quantkit.calibration.gptq import Calibrated, GptqSettings, gptq
from quantkit.calibration.hessian import Hessian
from quantkit.calibration.retry import retried

SETTINGS = GptqSettings(group_size=32, shrink=False)


def error_of(result: Any) -> float:
    return float((result.error.sum(dtype=np.float64) / result.energy.sum(dtype=np.float64)) ** 0.5)


@pytest.fixture(scope="module")
def case() -> tuple[Calibrated, np.ndarray[Any, Any], Hessian]:
    """A weight whose inputs are far from white, so that GPTQ moves far from it."""
    random = torch.Generator().manual_seed(3)
    weight = torch.randn(64, 128, generator=random).numpy()
    inputs = torch.randn(400, 12, generator=random) @ torch.randn(12, 128, generator=random)
    hessian = Hessian(128, where="test")
    hessian.add(inputs + 0.01 * torch.randn(400, 128, generator=random), torch.ones(400))
    return gptq([weight], hessian, SETTINGS)[0], weight, hessian


def tried(case: Any, limit: float) -> Calibrated:
    first, weight, hessian = case
    return retried(first, weight, hessian, SETTINGS, lambda result: error_of(result) - limit)


def test_the_first_within_the_limit_is_taken(case: Any) -> None:
    first, weight, hessian = case
    damped = gptq([weight], hessian, replace(SETTINGS, percdamp=0.1))[0]
    plain = kernels.float_to_int4(weight, 32, "mse")
    errors = [error_of(first.weight), error_of(damped.weight), error_of(plain)]
    assert errors == sorted(errors, reverse=True) and len(set(errors)) == 3
    assert tried(case, errors[0]) is first
    again = tried(case, errors[1])
    assert (again.retry, again.percdamp) == ("dampening", pytest.approx(0.1))
    assert np.array_equal(again.weight.packed, damped.weight.packed)
    for limit in (errors[2], errors[2] / 2):  # the last one, also where it is over
        last = tried(case, limit)
        assert (last.retry, last.form) == ("mse", "unused")
        assert np.array_equal(last.weight.packed, plain.packed) and np.array_equal(last.weight.scale, plain.scale)
        back = kernels.int4_to_float32(plain.packed, plain.scale, 128)
        norms = hessian.norms(torch.from_numpy(weight - back))
        assert last.hessian_error == pytest.approx(float(norms.sum()), rel=1e-5)
        assert set(last.floor_errors) == set(SETTINGS.floors)
