"""Linears in float32 torch. x ``[N, I]`` with contiguous rows and out ``[N, O]`` contiguous, both not empty."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quantkit_kernels.forward.weights import Fp8Weight, Int4Weight

TILE_ELEMENTS = 1 << 22  # weights decoded at a time: 16 MiB of float32


def int4_linear(x: Tensor, weight: Int4Weight, out: Tensor) -> None:
    _linear(x, weight, out)


def fp8_linear(x: Tensor, weight: Fp8Weight, out: Tensor) -> None:
    _linear(x, weight, out)


def product(x: Tensor, weight: Int4Weight | Fp8Weight) -> Tensor:
    """``x W^T`` of float32 x, in float32 ``[N, O]``."""
    out = x.new_empty(x.shape[0], weight.out_features)
    for rows in _tiles(weight):
        out[:, rows] = x @ dequantize(weight, rows).T
    return out


def dequantize(weight: Int4Weight | Fp8Weight, rows: slice) -> Tensor:
    """Rows ``rows`` (step 1) of a weight as float32 ``[n, I]``."""
    if isinstance(weight, Int4Weight):
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=weight.packed.device)
        nibbles = (weight.packed[rows].unsqueeze(-1) >> shifts) & 15  # [n, words, 8]
        scale = weight.scale[rows].float().repeat_interleave(weight.group_size, dim=1)
        return (nibbles - 8).flatten(1).float() * scale
    first, last, _ = rows.indices(weight.out_features)
    bands = torch.arange(first, last, device=weight.scale.device) // weight.block[0]
    width = min(weight.block[1], max(weight.in_features, 1))
    scale = weight.scale[bands].repeat_interleave(width, dim=1)[:, : weight.in_features]
    return weight.codes[rows].float() * scale


def _linear(x: Tensor, weight: Int4Weight | Fp8Weight, out: Tensor) -> None:
    out.copy_(product(x.float(), weight))


def _tiles(weight: Int4Weight | Fp8Weight) -> Iterator[slice]:
    step = max(1, TILE_ELEMENTS // max(weight.in_features, 1))
    return (slice(start, start + step) for start in range(0, weight.out_features, step))
