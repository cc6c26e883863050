"""Experts against a float64 loop over tokens, on every implementation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quantkit_kernels.forward.experts import moe_fp8, moe_int4
from quantkit_kernels.forward.weights import Experts

from .made_up import activations, decoded, experts, fp8, int4

KINDS = ("int4", "fp8")


def run(
    kind: str, hidden: Tensor, ids: Tensor, weights: Tensor, layer: Experts, out: Tensor | None = None
) -> Tensor:
    return (moe_int4 if kind == "int4" else moe_fp8)(hidden, ids, weights, layer, out=out)


def routing(seed: int, tokens: int, top: int, count: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, count, generator=g).argsort(dim=1)[:, :top]
    return ids, torch.rand(tokens, top, generator=g)


def reference(hidden: Tensor, ids: Tensor, weights: Tensor, layer: Experts) -> tuple[np.ndarray, np.ndarray]:
    """(result, sum over experts of weight * |h||down|) in float64; h rounded to bfloat16."""
    x = hidden.double().numpy()
    out, size = np.zeros(x.shape), np.zeros(x.shape)
    parts = [[decoded(w) for w in expert] for expert in zip(layer.gate, layer.up, layer.down, strict=True)]
    for t in range(x.shape[0]):
        for k, e in enumerate(ids[t].tolist()):
            if e < 0:
                continue
            gate, up, down = parts[e]
            g, u = gate @ x[t], up @ x[t]
            h = torch.from_numpy(g / (1 + np.exp(-g)) * u).bfloat16().double().numpy()
            out[t] += float(weights[t, k]) * (down @ h)
            size[t] += abs(float(weights[t, k])) * (np.abs(down) @ np.abs(h))
    return out, size


def check(kind: str, hidden: Tensor, ids: Tensor, weights: Tensor, layer: Experts) -> Tensor:
    want, size = reference(hidden, ids, weights, layer)
    y = run(kind, hidden, ids, weights, layer)
    error = np.abs(y.double().numpy() - want)
    assert (error <= 2.0**-7 * np.abs(want) + 2.0**-7 * size).all()
    if want.size > 500 and np.abs(want).max() > 0:
        assert np.sqrt((error**2).mean()) <= 2.0**-7 * np.sqrt((want**2).mean())
    return y


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hidden, inner", [(128, 128), (576, 96), (160, 288)])
def test_matches_float64(each_implementation: str, kind: str, hidden: int, inner: int) -> None:
    layer = experts(kind, 1, 8, hidden, inner)
    for tokens in (1, 2, 7, 33):
        ids, weights = routing(tokens, tokens, 3, 8)
        check(kind, activations(tokens, tokens, hidden), ids, weights, layer)


@pytest.mark.parametrize("hidden, inner", [(7, 13), (67, 33), (129, 1), (1, 129)])
def test_fp8_odd_sizes(each_implementation: str, hidden: int, inner: int) -> None:
    layer = experts("fp8", 2, 5, hidden, inner)
    for tokens in (1, 13):
        ids, weights = routing(tokens, tokens, 2, 5)
        check("fp8", activations(tokens, tokens, hidden), ids, weights, layer)


@pytest.mark.parametrize("group", [64, 128])
def test_int4_groups(each_implementation: str, group: int) -> None:
    layer = experts("int4", 3, 4, 256, 384, group)
    ids, weights = routing(3, 13, 2, 4)
    check("int4", activations(3, 13, 256), ids.to(torch.int32), weights, layer)


@pytest.mark.parametrize("kind", KINDS)
def test_one_expert_and_all_tokens_to_one(each_implementation: str, kind: str) -> None:
    single = experts(kind, 4, 1, 160, 64)
    hidden = activations(4, 133, 160)
    weights = torch.rand(133, 1)
    check(kind, hidden, torch.zeros(133, 1, dtype=torch.int64), weights, single)
    layer = experts(kind, 4, 6, 160, 64)
    check(kind, hidden, torch.full((133, 1), 5), weights, layer)
    check(kind, hidden[:9], torch.tensor([[2, 2]]).expand(9, 2), torch.rand(9, 2), layer)


@pytest.mark.parametrize("kind", KINDS)
def test_skipped_and_empty(each_implementation: str, kind: str) -> None:
    layer = experts(kind, 5, 6, 160, 64)
    hidden = activations(5, 9, 160)
    ids, weights = routing(5, 9, 3, 6)
    ids[::2, 1] = -1
    ids[4] = -1
    y = check(kind, hidden, ids, weights, layer)
    assert not y[4].any()
    assert not run(kind, hidden, torch.full_like(ids, -1), weights, layer).any()
    assert run(kind, hidden[:0], ids[:0], weights[:0], layer).shape == (0, 160)
    assert not run(kind, hidden, ids[:, :0], weights[:, :0], layer).any()


@pytest.mark.parametrize("kind", KINDS)
def test_strided_arguments(each_implementation: str, kind: str) -> None:
    layer = experts(kind, 6, 4, 160, 64)
    hidden = activations(6, 22, 200)[::2, 33:193]
    ids, weights = routing(6, 11, 4, 4)
    y = check(kind, hidden, ids[:, ::2], weights.T.contiguous().T[:, ::2], layer)
    out = torch.empty_like(y)
    assert run(kind, hidden, ids[:, ::2], weights[:, ::2], layer, out) is out and torch.equal(out, y)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_special_numbers_stay_with_their_token(each_implementation: str, kind: str, bad: float) -> None:
    layer = experts(kind, 7, 4, 160, 64)
    hidden = activations(7, 9, 160)
    ids, weights = routing(7, 9, 2, 4)
    clean = run(kind, hidden, ids, weights, layer)
    hidden[3, 159] = bad
    y = run(kind, hidden, ids, weights, layer)
    others = torch.arange(9) != 3
    assert not y[3].isfinite().any() and torch.equal(y[others], clean[others])
    weights[5, 1] = bad
    y = run(kind, hidden, ids, weights, layer)
    assert not y[5].isfinite().any() and torch.equal(y[others][5:], clean[others][5:])


def test_large_gates(each_implementation: str) -> None:
    """silu far from zero on both sides: gates of thousands, where exp overflows."""
    layer = experts("fp8", 8, 2, 256, 64)
    ids, weights = routing(8, 5, 2, 2)
    check("fp8", activations(8, 5, 256) * 64, ids, weights, layer)


@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_for_a_token_alone_and_any_threads(each_level: str, kind: str) -> None:
    layer = experts(kind, 9, 4, 416, 160)
    hidden = activations(9, 70, 416)
    ids, weights = routing(9, 70, 2, 4)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = run(kind, hidden, ids, weights, layer)
        torch.set_num_threads(2)
        assert torch.equal(run(kind, hidden, ids, weights, layer), whole)
        for n in (1, 2, 9):
            part = slice(20, 20 + n)
            assert torch.equal(run(kind, hidden[part], ids[part], weights[part], layer), whole[part])
    finally:
        torch.set_num_threads(before)


def test_wrong_arguments_are_named() -> None:
    layer = experts("int4", 10, 4, 64, 32)
    hidden = activations(1, 3, 64)
    ids, weights = routing(1, 3, 2, 4)
    for wrong in (4, -2, 2**40):
        broken = ids.clone()
        broken[2, 1] = wrong
        with pytest.raises(ValueError, match=f"topk_ids must be in .*got {wrong}"):
            moe_int4(hidden, broken, weights, layer)
    with pytest.raises(TypeError, match="topk_ids"):
        moe_int4(hidden, ids.to(torch.int16), weights, layer)
    with pytest.raises(ValueError, match="topk_ids"):
        moe_int4(hidden, ids[:2], weights, layer)
    with pytest.raises(ValueError, match="topk_weights"):
        moe_int4(hidden, ids, weights[:, :1], layer)
    with pytest.raises(TypeError, match="topk_weights"):
        moe_int4(hidden, ids, weights.double(), layer)
    with pytest.raises(ValueError, match="hidden"):
        moe_int4(hidden[:, :63], ids, weights, layer)
    with pytest.raises(TypeError, match="hidden"):
        moe_int4(hidden.float(), ids, weights, layer)
    with pytest.raises(ValueError, match="out shares memory with hidden"):
        moe_int4(hidden, ids, weights, layer, out=hidden)
    with pytest.raises(ValueError, match="out shares memory with experts"):
        moe_int4(hidden[:1], ids[:1], weights[:1], layer, out=layer.down[1].scale.view(-1)[:64].view(1, 64))
    with pytest.raises(TypeError, match="experts"):
        moe_fp8(hidden, ids, weights, layer)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"experts\.up\[0\]"):
        Experts([int4(1, 32, 64, 32)], [int4(1, 31, 64, 32)], [int4(1, 64, 32, 32)])
    with pytest.raises(ValueError, match="format"):
        Experts([fp8(1, 32, 64)], [fp8(1, 32, 64, (64, 64))], [fp8(1, 64, 32)])
