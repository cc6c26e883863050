"""Our dequantizer against plain loops, compressed-tensors and torch, on every FP8 weight of the bundled models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize as ct_dequantize

import quantkit_kernels as kernels
from quantkit.checkpoint import open_checkpoint
from quantkit.checkpoint.tensor import Storage
from quantkit.data import MODELS

from . import e4m3

PARTIAL = "model.layers.0.self_attn.kv_a_proj_with_mqa"  # 144 rows: one block of 128 and one of 16


def read(checkpoint, module):
    """FP8 codes and float32 scales as stored, without our scale reader."""
    weight = checkpoint.weight(module)
    stored = checkpoint.array(weight.scale)
    scales = stored if stored.dtype == np.float32 else (stored.astype(np.uint32) << 16).view(np.float32)
    return checkpoint.array(weight.weight), scales


def fp8_modules(checkpoint):
    return [m for m, w in checkpoint.weights().items() if w.storage is Storage.FP8_BLOCK]


@pytest.mark.parametrize(
    ("name", "module"), [("tiny-glm", PARTIAL), ("tiny-qwen3", "model.layers.0.self_attn.k_proj")]
)
def test_element_by_element(name, module):
    """One Python loop over rows and columns; nothing vectorised, nothing shared."""
    with open_checkpoint(name) as checkpoint:
        codes, scales = read(checkpoint, module)
        ours = kernels.fp8_to_float32(codes, scales, (128, 128))
        ours_bf16 = kernels.fp8_to_bf16(codes, scales, (128, 128))
    grid = scales.tolist()
    for row, line in enumerate(codes.tolist()):
        for column, code in enumerate(line):
            expected = e4m3.round_float32(e4m3.decode(code) * grid[row // 128][column // 128])
            assert ours[row, column] == expected, (row, column)
            assert ours_bf16[row, column] == e4m3.bf16_bits(expected), (row, column)


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_block_by_block(name):
    """A loop over blocks with a table of decoded codes, for all weights; all 254 finite codes occur."""
    table = np.array([e4m3.decode(c) for c in range(256)], dtype=np.float64)
    seen = np.zeros(256, dtype=bool)
    with open_checkpoint(name) as checkpoint:
        modules = fp8_modules(checkpoint)
        for module in modules:
            codes, scales = read(checkpoint, module)
            expected = np.empty(codes.shape, dtype=np.float32)
            for i in range(0, codes.shape[0], 128):
                for j in range(0, codes.shape[1], 128):
                    block = (slice(i, i + 128), slice(j, j + 128))
                    expected[block] = table[codes[block]] * float(scales[i // 128, j // 128])
            assert np.array_equal(kernels.fp8_to_float32(codes, scales, (128, 128)), expected), module
            seen[np.unique(codes)] = True
    assert len(modules) > 300
    assert not seen[[0x7F, 0xFF]].any()
    assert seen.sum() == 254


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_as_compressed_tensors(name):
    """compressed-tensors returns float32 for block FP8: the same bits, partial blocks included."""
    args = QuantizationArgs(
        num_bits=8, type="float", strategy="block", block_structure=[128, 128], symmetric=True, dynamic=False
    )
    with open_checkpoint(name) as checkpoint:
        for module in fp8_modules(checkpoint):
            codes, scales = read(checkpoint, module)
            theirs = ct_dequantize(
                torch.from_numpy(codes).view(torch.float8_e4m3fn), torch.from_numpy(scales), args=args
            )
            assert theirs.dtype == torch.float32
            ours = torch.from_numpy(kernels.fp8_to_float32(codes, scales, (128, 128)))
            assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32)), module
            ours_bf16 = torch.from_numpy(kernels.fp8_to_bf16(codes, scales, (128, 128)).view(np.int16))
            assert torch.equal(ours_bf16, theirs.bfloat16().view(torch.int16)), module
