"""Conversions against sources that share no code with them: compressed-tensors, torch casts, ml_dtypes, loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from compressed_tensors.quantization.utils import calculate_qparams

import quantkit_kernels as kernels

from .weights import bf16, fp8_codes, scales_for, spread

pytestmark = pytest.mark.usefixtures("each_backend")


def _plain_product(codes: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    values = np.empty(256, np.float64)
    for code in range(256):
        sign, e, m = -1.0 if code & 128 else 1.0, (code >> 3) & 15, code & 7
        values[code] = sign * (m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7))
    out = np.empty(codes.shape, np.float32)
    for r in range(codes.shape[0]):
        for c in range(codes.shape[1]):
            out[r, c] = np.float32(values[codes[r, c]]) * scales[r // block[0], c // block[1]]
    return out


@pytest.mark.parametrize("block", [(128, 128), (5, 7), (1, 200), (150, 200), (3, 64)])
def test_fp8_to_float32_is_the_plain_loop(block: tuple[int, int]) -> None:
    codes = fp8_codes(0, (150, 200))
    scales = scales_for(1, codes.shape, block)
    expected = _plain_product(codes, scales, block)
    got = kernels.fp8_to_float32(codes, scales, block)
    assert np.array_equal(got.view(np.uint32), expected.view(np.uint32))
    as_bf16 = torch.from_numpy(expected).to(torch.bfloat16).view(torch.uint16).numpy()
    assert np.array_equal(kernels.fp8_to_bf16(codes, scales, block), as_bf16)


def test_every_fp8_code_decodes_as_torch_says() -> None:
    codes = np.array([[c for c in range(256) if c & 0x7F != 0x7F]], np.uint8)
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).to(torch.float32).numpy()
    got = kernels.fp8_to_float32(codes, np.ones((1, 1), np.float32), (1, 254))
    assert np.array_equal(got.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("rows", [1, 13, 144])
def test_rtn_is_compressed_tensors(group_size: int, rows: int) -> None:
    codes = fp8_codes(2, (rows, 384))
    codes[0, :group_size] = 0  # a group of zeros
    codes[0, group_size : 2 * group_size] = 0x80  # and of negative ones
    scales = scales_for(3, codes.shape, (128, 128))
    got = kernels.fp8_to_int4(codes, scales, (128, 128), group_size, "rtn")

    w = torch.from_numpy(_plain_product(codes, scales, (128, 128)))
    args = QuantizationArgs(num_bits=4, strategy=QuantizationStrategy.GROUP, group_size=group_size, symmetric=True)
    grouped = w.reshape(rows, -1, group_size)
    scale, _ = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
    scale = torch.where(grouped.abs().amax(-1) == 0, torch.finfo(torch.bfloat16).eps, scale).to(torch.bfloat16)
    q = quantize(x=w, scale=scale.float(), zero_point=None, args=args, dtype=torch.int8)
    assert np.array_equal(got.scale, scale.view(torch.uint16).numpy())
    assert np.array_equal(got.packed, pack_to_int32(q, 4).numpy())
    assert got.scale[0, 0] == 0x3C00  # 0.0078125
    assert (unpack_from_int32(torch.from_numpy(got.packed), 4, w.shape)[0, : 2 * group_size] == 0).all()

    back = dequantize(q, scale.float(), args=args, dtype=torch.float32)
    assert np.array_equal(kernels.int4_to_float32(got.packed, got.scale, 384), back.numpy())
    error = ((w.double() - back.double()).reshape(rows, -1, group_size) ** 2).sum(-1).numpy()
    np.testing.assert_allclose(got.error, error, rtol=1e-5)
    energy = (w.double().reshape(rows, -1, group_size) ** 2).sum(-1).numpy()
    np.testing.assert_allclose(got.energy, energy, rtol=1e-5)


def _grid(w: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Candidates of mse ``[O, G, C]``, their codes ``[O, G, C, 32]`` and errors ``[O, G, C]`` in float64."""
    groups = w.reshape(len(w), -1, 32).astype(np.float64)
    factors = np.array([1.0, *(k / 80 for k in range(96, 55, -1) if k != 80)], np.float32)
    base = (np.abs(groups).max(-1).astype(np.float32) / np.float32(7.5))[..., None] * factors
    candidates = torch.from_numpy(base).to(torch.bfloat16).double().numpy()
    q = np.clip(np.rint(groups[:, :, None] / candidates[..., None]), -8, 7)
    squares = (groups[:, :, None] - q * candidates[..., None]) ** 2
    return candidates, q, (squares * counts.reshape(-1, 1, 32)).sum(-1)


def _stored(got: kernels.Int4Weight, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes ``[O, G, 32]`` and scales ``[O, G]`` in float64."""
    q = unpack_from_int32(torch.from_numpy(got.packed), 4, (len(got.packed), columns)).double().numpy()
    return q.reshape(len(q), -1, 32), kernels.bf16_to_float32(got.scale).astype(np.float64)


def test_mse_by_importance_is_the_best_of_its_grid_in_float64() -> None:
    w = spread(4, (16, 256))
    importance = np.random.default_rng(5).gamma(0.3, 1e3, 256).astype(np.float32)
    got = kernels.float_to_int4(w, 32, "mse", importance=importance)
    candidates, _, errors = _grid(w, importance.astype(np.float64))
    q, scale = _stored(got, 256)
    is_chosen = scale[..., None] == candidates
    assert is_chosen.any(-1).all()
    np.testing.assert_allclose(np.where(is_chosen, errors, np.inf).min(-1), errors.min(-1), rtol=1e-5)
    plain = ((w.reshape(16, 8, 32) - q * scale[..., None]) ** 2).sum(-1)
    np.testing.assert_allclose(got.error, plain, rtol=1e-5)


def test_mse_has_the_best_codes_of_its_grid_and_an_unbiased_scale_in_float64() -> None:
    w = spread(4, (64, 256))
    got = kernels.float_to_int4(w, 32, "mse")
    q, scale = _stored(got, 256)
    candidates, codes, errors = _grid(w, np.ones(256))
    is_chosen = (q[:, :, None] == codes).all(-1)  # candidates that give these codes
    np.testing.assert_allclose(np.where(is_chosen, errors, np.inf).min(-1), errors.min(-1), rtol=1e-5)

    groups = w.reshape(64, 8, 32).astype(np.float64)
    unbiased = (groups**2).sum(-1) / (q * groups).sum(-1)
    rounded = torch.from_numpy(unbiased).to(torch.bfloat16).double().numpy()
    trial = ((groups - q * rounded[..., None]) ** 2).sum(-1)
    is_unbiased, is_plain = scale == rounded, (scale[..., None] == candidates).any(-1)
    assert (is_unbiased | is_plain).all()
    rtn = errors[..., 0]
    assert (trial[is_unbiased] <= rtn[is_unbiased] * (1 + 1e-5)).all()
    assert (trial[~is_unbiased] > rtn[~is_unbiased] * (1 - 1e-5)).all()
    assert 0.5 < is_unbiased.mean() < 1  # both occur
    np.testing.assert_allclose(got.error, ((groups - q * scale[..., None]) ** 2).sum(-1), rtol=1e-5)
    assert (got.error <= kernels.float_to_int4(w, 32, "rtn").error).all()


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_mse_does_not_shrink(group_size: int) -> None:
    """The gain of the stored weights over the true ones; the plain search's (importance 1) falls short of 1."""
    w = np.random.default_rng(6).standard_normal((128, 1024), dtype=np.float32)

    def gain(**options: np.ndarray) -> float:
        got = kernels.float_to_int4(w, group_size, "mse", **options)
        back = kernels.int4_to_float32(got.packed, got.scale, 1024).astype(np.float64)
        return float((back * w).sum() / (w.astype(np.float64) ** 2).sum())

    assert abs(gain() - 1) < 1.5e-3
    assert gain(importance=np.ones(1024, np.float32)) < 0.995


@pytest.mark.parametrize("exponent", [-149, -140, -130, -120, -60, 0, 60, 120])
def test_mse_scale_is_a_positive_number_at_every_size(exponent: int) -> None:
    w = np.ldexp(np.random.default_rng(7).standard_normal((64, 256)), exponent).astype(np.float32)
    w[:, :96] = np.ldexp(np.float32(0.5000001), exponent)  # codes of 0 or 1 beside a larger weight
    w[:, ::32] = np.ldexp(np.float32(6.9), exponent)
    scale = kernels.bf16_to_float32(kernels.float_to_int4(w, 32, "mse").scale)
    assert np.isfinite(scale).all() and (scale > 0).all()
    if -60 <= exponent <= 60:  # elsewhere squares under- or overflow
        by_one = kernels.float_to_int4(np.ldexp(w, -exponent), 32, "mse")
        assert np.array_equal(scale, np.ldexp(kernels.bf16_to_float32(by_one.scale), exponent))


@pytest.mark.parametrize("columns", [8, 40, 63, 65, 1])
def test_unpack_foreign_widths(columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    q = torch.randint(-8, 8, (7, columns), generator=generator, dtype=torch.int8)
    scale = torch.rand(7, -(-columns // 16), generator=generator).to(torch.bfloat16)
    packed = pack_to_int32(q, 4).numpy()
    expected = q.float() * scale.float().repeat_interleave(16, dim=1)[:, :columns]
    bits = scale.view(torch.uint16).numpy()
    got = kernels.int4_to_float32(packed, bits, columns, group_size=16)
    assert np.array_equal(got, expected.numpy())
    got_bf16 = kernels.int4_to_bf16(packed, bits, columns, group_size=16)
    in_bf16 = q.to(torch.bfloat16) * scale.repeat_interleave(16, dim=1)[:, :columns]
    assert np.array_equal(got_bf16, in_bf16.view(torch.uint16).numpy())


def test_fp8_encoding_of_every_bf16_is_torchs_cast() -> None:
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    values = kernels.bf16_to_float32(bits)
    keep = np.isfinite(values) & (np.abs(values) <= 448)
    row = np.concatenate([[np.float32(448)], values[keep]]).astype(np.float32)[None]  # absmax 448: scale is 1
    codes, scales = kernels.float_to_fp8(row, (1, row.shape[1]))
    expected = torch.from_numpy(row).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert scales.tolist() == [[1.0]]
    assert np.array_equal(codes, expected)


@pytest.mark.parametrize("shape", [(128, 128), (130, 257), (1, 1), (300, 64)])
def test_float_to_fp8_is_the_plain_formula(shape: tuple[int, int]) -> None:
    weight = spread(5, shape)
    weight[:1, :] = 0
    for source in (weight, bf16(weight)):
        values = kernels.bf16_to_float32(source) if source.dtype == np.uint16 else source
        codes, scales = kernels.float_to_fp8(source)
        for i in range(0, shape[0], 128):
            for j in range(0, shape[1], 128):
                block = values[i : i + 128, j : j + 128]
                scale = np.abs(block).max() / np.float32(448) or np.float32(2.0**-23)
                assert scales[i // 128, j // 128] == scale
                cast = torch.from_numpy(block / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
                assert np.array_equal(codes[i : i + 128, j : j + 128], cast.view(torch.uint8).numpy())


def test_bf16_rounding_is_torchs_on_every_upper_half() -> None:
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        values = (upper | lower).astype(np.uint32).view(np.float32)
        got = kernels.float32_to_bf16(values)
        is_nan = np.isnan(values)
        expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
        assert np.array_equal(got[~is_nan], expected[~is_nan])
        assert np.isnan(kernels.bf16_to_float32(got[is_nan])).all()
        assert np.array_equal(got[is_nan] >> 15, upper[is_nan] >> 31)
