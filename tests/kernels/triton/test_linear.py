"""Linears and experts in Triton against float64 products of independently decoded weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quantkit_kernels.forward import experts as public
from quantkit_kernels.forward import linear
from quantkit_kernels.forward.triton import linear as triton_linear
from quantkit_kernels.forward.weights import Fp8Weight, Int4Weight

from ..forward import made_up

pytestmark = pytest.mark.usefixtures("on_triton")


def rows(seed: int, tokens: int, columns: int) -> Tensor:
    return torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()


def run(x: Tensor, weight: Int4Weight | Fp8Weight) -> Tensor:
    if isinstance(weight, Int4Weight):
        return linear.int4_linear(x, weight)
    return linear.fp8_linear(x, weight)


def check(found: Tensor, x: Tensor, weight: Int4Weight | Fp8Weight) -> None:
    """The bound of linear.py."""
    w, a = made_up.decoded(weight), x.double().numpy()
    wanted, size = a @ w.T, np.abs(a) @ np.abs(w).T
    limit = (x.shape[-1] / 128 + 16) * 2.0**-24 * size + 2.0**-8 * np.abs(wanted)
    error = np.abs(found.double().numpy() - wanted)
    assert (error <= limit).all(), (error / limit).max()


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(
    ("tokens", "outputs", "columns"), [(1, 33, 128), (7, 67, 384), (17, 129, 640), (67, 13, 128)]
)
def test_int4(group: int, tokens: int, outputs: int, columns: int) -> None:
    weight, x = made_up.int4(tokens, outputs, columns, group), rows(tokens, tokens, columns)
    check(run(x, weight), x, weight)


@pytest.mark.parametrize("block", [(128, 128), (16, 32), (7, 96), (1000, 1000)])
@pytest.mark.parametrize(("tokens", "outputs", "columns"), [(1, 33, 77), (13, 67, 300), (67, 129, 129)])
def test_fp8(block: tuple[int, int], tokens: int, outputs: int, columns: int) -> None:
    weight, x = made_up.fp8(tokens, outputs, columns, block), rows(tokens, tokens, columns)
    check(run(x, weight), x, weight)


@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_columns_in_parts_and_a_row_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts in programs of their own or one after the other, and any batch: the same bits."""
    monkeypatch.setattr(triton_linear, "SPLIT_COLUMNS", 128)
    monkeypatch.setattr(triton_linear, "PROGRAMS", 3)
    weight = made_up.int4(1, 33, 640, 32) if kind == "int4" else made_up.fp8(1, 33, 600)
    x = rows(2, 70, weight.in_features)
    assert triton_linear.splits_of(weight.out_features, weight.in_features) > 1
    whole = run(x, weight)
    check(whole, x, weight)
    few = run(x[:20], weight)
    assert torch.equal(few, whole[:20]) and torch.equal(run(x[19:20], weight), whole[19:20])


@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_strides_offsets_and_numbers_that_are_not_finite(kind: str) -> None:
    wide = made_up.int4(3, 40, 384, 32) if kind == "int4" else made_up.fp8(3, 40, 384)
    if isinstance(wide, Int4Weight):
        weight: Int4Weight | Fp8Weight = Int4Weight(wide.packed[3:36, 16:32], wide.scale[3:36, 4:8])
    else:
        weight = Fp8Weight(wide.codes[:33, 128:256], wide.scale[:, 1:2])
    x = rows(4, 5, 300)[:, 7:135]
    check(run(x, weight), x, weight)
    bad = x.clone()
    bad[1, 3], bad[3, 100] = float("nan"), float("inf")
    found = run(bad, weight)
    assert found[[0, 2, 4]].isfinite().all() and torch.equal(found[[0, 2, 4]], run(x, weight)[[0, 2, 4]])
    assert found[1].isnan().all() and not found[3].isfinite().any()


def moe(x: Tensor, ids: Tensor, weights: Tensor, experts: public.Experts) -> tuple[np.ndarray, np.ndarray]:
    """The layer in float64 with h rounded, and the bound of experts.py."""
    hidden = x.double().numpy()
    out, slack = np.zeros_like(hidden), np.zeros_like(hidden)
    for t, k in np.ndindex(*ids.shape):
        e, weight = int(ids[t, k]), float(weights[t, k])
        if e < 0:
            continue
        gate, up, down = (made_up.decoded(part[e]) for part in (experts.gate, experts.up, experts.down))
        g = hidden[t] @ gate.T
        h = torch.from_numpy(g / (1 + np.exp(-g)) * (hidden[t] @ up.T)).bfloat16().double().numpy()
        out[t] += weight * (h @ down.T)
        slack[t] += abs(weight) * (np.abs(h) @ np.abs(down).T)
    return out, 2.0**-7 * (np.abs(out) + slack)


@pytest.mark.parametrize("kind", ["int4", "fp8"])
@pytest.mark.parametrize(
    ("tokens", "choices", "count", "dtype"),
    [(1, 2, 3, torch.int32), (7, 3, 2, torch.int64), (35, 1, 1, torch.int32)],
)
def test_experts(kind: str, tokens: int, choices: int, count: int, dtype: torch.dtype) -> None:
    """One token, several of any expert and skipped ones, all to one expert in tiles of 64."""
    experts = made_up.experts(kind, tokens, count, 128, 96 if kind == "int4" else 70)
    generator = torch.Generator().manual_seed(tokens)
    x = rows(tokens, tokens, 128) * 0.2
    ids = torch.randint(-1, count, (tokens, choices), generator=generator, dtype=dtype)
    weights = torch.rand(tokens, choices, generator=generator)
    function = public.moe_int4 if kind == "int4" else public.moe_fp8
    found = function(x, ids, weights, experts)
    wanted, limit = moe(x, ids, weights, experts)
    assert (np.abs(found.double().numpy() - wanted) <= limit).all()
    alone = function(x[-1:], ids[-1:], weights[-1:], experts)
    assert torch.equal(alone, found[-1:])


def test_experts_group_128() -> None:
    experts = made_up.experts("int4", 5, 2, 128, 128, group=128)
    x, ids = rows(6, 2, 128) * 0.2, torch.tensor([[1, 0], [-1, 1]])
    weights = torch.tensor([[0.5, -2.0], [9.0, 1.0]])
    wanted, limit = moe(x, ids, weights, experts)
    assert (np.abs(public.moe_int4(x, ids, weights, experts).double().numpy() - wanted) <= limit).all()
