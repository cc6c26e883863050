"""Linears against float64, on every implementation: odd sizes, strides, special numbers, wrong arguments."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quantkit_kernels.forward.linear import fp8_linear, int4_linear
from quantkit_kernels.forward.weights import Fp8Weight, Int4Weight

from .made_up import activations, decoded, e4m3, fp8, int4

ROWS = (1, 2, 3, 4, 5, 7, 8, 13, 33, 67, 129)


def run(x: Tensor, weight: Int4Weight | Fp8Weight, out: Tensor | None = None) -> Tensor:
    return int4_linear(x, weight, out=out) if isinstance(weight, Int4Weight) else fp8_linear(x, weight, out=out)


def check(x: Tensor, weight: Int4Weight | Fp8Weight, out: Tensor | None = None) -> Tensor:
    """The result, within the stated bounds of the float64 reference."""
    w, x64 = decoded(weight), x.double().numpy()
    want, size = x64 @ w.T, np.abs(x64) @ np.abs(w).T
    y = run(x, weight, out)
    error = np.abs(y.double().numpy() - want)
    bound = (x.shape[-1] / 128 + 16) * 2.0**-24 * size + 2.0**-8 * np.abs(want) * (1 + 2.0**-7)
    assert (error <= bound).all(), float((error - bound).max())
    if want.size > 500:
        assert np.sqrt((error**2).mean()) <= 2.0**-8.5 * np.sqrt((want**2).mean())
    return y


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("columns", [128, 384, 1408])
def test_int4_matches_float64(each_implementation: str, group: int, columns: int) -> None:
    weight = int4(group + columns, 67, columns, group)
    for rows in ROWS:
        check(activations(rows, rows, columns), weight)


@pytest.mark.parametrize("group, columns", [(32, 32), (32, 96), (32, 576), (64, 64), (64, 576), (32, 2208)])
def test_int4_partial_units(each_implementation: str, group: int, columns: int) -> None:
    for outputs in (1, 13, 129):
        weight = int4(outputs, outputs, columns, group)
        for rows in (1, 2, 7, 33):
            check(activations(rows, rows, columns), weight)


@pytest.mark.parametrize("columns", [1, 7, 13, 33, 67, 129, 576, 1408])
@pytest.mark.parametrize("outputs", [1, 7, 129, 300])
def test_fp8_matches_float64(each_implementation: str, columns: int, outputs: int) -> None:
    weight = fp8(columns + outputs, outputs, columns)
    for rows in (1, 2, 3, 4, 7, 33) if outputs < 300 else (1, 67, 129):
        check(activations(rows, rows, columns), weight)


@pytest.mark.parametrize("block", [(1, 32), (64, 64), (13, 96), (128, 256), (1000, 1000), (7, 301), (1, 301)])
def test_fp8_other_blocks(each_implementation: str, block: tuple[int, int]) -> None:
    weight = fp8(sum(block), 67, 301, block)
    for rows in (1, 4, 9):
        check(activations(rows, rows, 301), weight)


def test_every_fp8_code_is_exact(each_implementation: str) -> None:
    """One output per code, one input that is not zero: all 256 codes come back, NaN included."""
    for at in (0, 9, 70, 127, 133):
        codes = torch.zeros(256, 140, dtype=torch.uint8)
        codes[:, at] = torch.arange(256, dtype=torch.uint8)
        weight = Fp8Weight(codes.view(torch.float8_e4m3fn), torch.ones(2, 2))
        for rows in (1, 6):
            x = torch.zeros(rows, 140, dtype=torch.bfloat16)
            x[:, at] = 0.5
            y = fp8_linear(x, weight).double().numpy()
            want = np.array([0.5 * e4m3(code) for code in range(256)])
            assert all(np.array_equal(row, want, equal_nan=True) for row in y)


def test_every_nibble_is_exact_in_every_place(each_implementation: str) -> None:
    columns = 160
    packed = torch.full((16 * columns, columns // 8), -0x77777778, dtype=torch.int32)  # nibbles of 8, that is 0
    for place in range(columns):
        for nibble in range(16):
            word = (0x88888888 & ~(15 << 4 * (place % 8))) | (nibble << 4 * (place % 8))
            packed[16 * place + nibble, place // 8] = word - (1 << 32 if word >> 31 else 0)
    weight = Int4Weight(packed, torch.ones(16 * columns, columns // 32, dtype=torch.bfloat16))
    x = (torch.arange(columns) + 1).bfloat16()[None].repeat(6, 1)
    want = (x[0].double()[:, None] * (torch.arange(16) - 8)).flatten().bfloat16()
    for rows in (1, 6):
        assert torch.equal(int4_linear(x[:rows], weight), want.expand(rows, -1))


def test_strides_offsets_and_shapes(each_implementation: str) -> None:
    big = int4(5, 40, 512, 32)
    weight = Int4Weight(big.packed[3:20, 32:52], big.scale[3:20, 8:13])
    x = activations(1, 4, 6, 200)[1:3, ::2, 40:]
    check(x, weight)
    check(activations(2, 160), weight)
    check(activations(2, 160, 9).T, weight)
    check(activations(2, 160)[None].expand(3, 160), weight)
    wide = fp8(6, 300, 500)
    check(activations(3, 5, 250), Fp8Weight(wide.codes[:260, 7:257], wide.scale[:, 1:3]))
    out = torch.empty(3, 17, dtype=torch.bfloat16)
    assert check(activations(4, 3, 160), weight, out) is out


def test_nothing_to_do(each_implementation: str) -> None:
    weight = int4(1, 8, 64, 32)
    assert run(activations(1, 0, 64), weight).shape == (0, 8)
    assert run(activations(1, 2, 0, 64), weight).shape == (2, 0, 8)
    empty = Int4Weight(weight.packed[:0], weight.scale[:0])
    assert run(activations(1, 3, 64), empty).shape == (3, 0)
    no_columns = Fp8Weight(torch.empty(5, 0, dtype=torch.float8_e4m3fn), torch.empty(1, 0))
    assert torch.equal(run(activations(1, 3, 0), no_columns), torch.zeros(3, 5, dtype=torch.bfloat16))


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_special_activations_stay_in_their_row(each_implementation: str, bad: float) -> None:
    for weight in (int4(1, 67, 160, 32), fp8(2, 67, 150)):
        columns = weight.in_features
        for rows in (1, 3, 8):
            x = activations(3, rows, columns)
            clean = run(x, weight)
            x[rows // 2, columns - 1] = bad
            y = run(x, weight).double().numpy()
            with np.errstate(invalid="ignore"):
                want = x.double().numpy() @ decoded(weight).T
            assert np.array_equal(np.isfinite(y), np.isfinite(want))
            assert np.array_equal(np.isnan(y), np.isnan(want))
            others = torch.arange(rows) != rows // 2
            assert torch.equal(torch.from_numpy(y).bfloat16()[others], clean[others])


def test_nan_codes_and_scales_stay_in_their_rows(each_implementation: str) -> None:
    weight = fp8(2, 70, 150)
    weight.codes.view(torch.uint8)[5, 149] = 0xFF
    packed = int4(2, 70, 160, 32)
    packed.scale[5, 4] = float("nan")
    for broken in (weight, packed):
        for rows in (1, 6):
            is_nan = run(activations(1, rows, broken.in_features), broken).isnan()
            assert is_nan[:, 5].all() and is_nan.sum() == rows


def test_large_and_small_numbers(each_implementation: str) -> None:
    """Saturating codes, subnormal codes and scales at both ends of float32 that their sums allow."""
    codes = torch.tensor([[0x7E, 0x01, 0x81, 0xFE]], dtype=torch.uint8).repeat(3, 40).view(torch.float8_e4m3fn)
    for scale in (1e-30, 1e30):
        weight = Fp8Weight(codes, torch.full((1, 2), scale))
        for rows in (1, 5):
            x = activations(1, rows, 160).abs()
            x[:, 0] += 4
            check(x, weight)


@pytest.mark.parametrize("make", [lambda: int4(1, 131, 1408, 32), lambda: fp8(1, 131, 1400)])
def test_same_bits_for_a_row_alone_and_any_threads(each_level: str, make) -> None:  # type: ignore[no-untyped-def]
    weight = make()
    x = activations(7, 141, weight.in_features)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = run(x, weight)
        torch.set_num_threads(2)
        assert torch.equal(run(x, weight), whole)
        for rows in (1, 2, 3, 4, 5, 8, 40):
            assert torch.equal(run(x[50 : 50 + rows], weight), whole[50 : 50 + rows]), rows
    finally:
        torch.set_num_threads(before)


def test_wrong_arguments_are_named() -> None:
    weight, x = int4(1, 8, 64, 32), activations(1, 3, 64)
    bad_outs = (
        torch.empty(3, 9, dtype=torch.bfloat16),
        torch.empty(8, 3, dtype=torch.bfloat16).T,
        x.view(-1)[:24].view(3, 8),
    )
    for out in bad_outs:
        with pytest.raises(ValueError, match="out"):
            int4_linear(x, weight, out=out)
    with pytest.raises(TypeError, match="out"):
        int4_linear(x, weight, out=torch.empty(3, 8))
    with pytest.raises(ValueError, match=r"out.*weight\.scale"):
        int4_linear(x[:1], weight, out=weight.scale.view(-1)[:8].view(1, 8))
    for value in (x.float(), x.half(), "x", x.to_sparse()):
        with pytest.raises(TypeError, match="x"):
            int4_linear(value, weight)  # type: ignore[arg-type]
    for value in (x[:, :63], x[0, 0]):
        with pytest.raises(ValueError, match="x must have 64 columns"):
            int4_linear(value, weight)
    with pytest.raises(ValueError, match=r"weight\.packed is on meta, expected on cpu or cuda"):
        Int4Weight(weight.packed.to("meta"), weight.scale.to("meta"))
    with pytest.raises(TypeError, match="weight"):
        int4_linear(x, fp8(1, 8, 64))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="weight"):
        fp8_linear(x, weight)  # type: ignore[arg-type]
