"""Linears over bfloat16 weights as they lie in a checkpoint: routers, language model heads, absorbed projections.

torch's own bfloat16 products repack the weight at every call (a tenth of the read bandwidth at one row) and give a
row other bits when other rows are there. These read the weight once and give a row the same bits whatever else is
in the batch, for any number of threads (native code).

Errors as in ``linear``, S = sum of |x||W|: float32 sums are off by at most (I/128 + 16) 2^-24 S, and rounding to
bfloat16, where that is asked for, adds at most 2^-8 |y|. Products below 2^-126 may count as zero. Inf and NaN
propagate.

Legend: N rows, B products, O outputs, I inputs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import check
from .choice import implementation

_RESULTS = (torch.bfloat16, torch.float32)


def plain_linear(x: Tensor, weight: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """``x W^T``.

    Args:
        x: bfloat16 ``[..., I]``.
        weight: bfloat16 ``[O, I]``, contiguous rows.
        dtype: of the result: bfloat16, or float32 for the sums as they are.

    Returns:
        ``[..., O]`` of ``dtype``.

    Raises:
        TypeError, ValueError: an argument does not fit; it is named.
    """
    check.matrix("weight", weight, torch.bfloat16)
    check.tensor("x", x, torch.bfloat16)
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x must have {weight.shape[1]} columns like weight, got shape {list(x.shape)}")
    rows = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # -1 fails without columns
    return _products(rows[:, None], weight[None], dtype).view(*x.shape[:-1], weight.shape[0])


def plain_linears(x: Tensor, weight: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """``x[:, b] weight[b]^T`` for each of B products of one shape, for example one per head.

    Args:
        x: bfloat16 ``[N, B, I]``, any strides.
        weight: bfloat16 ``[B, O, I]``, contiguous rows.
        dtype: as in ``plain_linear``.

    Returns:
        ``[N, B, O]`` of ``dtype``, contiguous.

    Raises:
        TypeError, ValueError: an argument does not fit; it is named.
    """
    check.tensor("weight", weight, torch.bfloat16, dims=3)
    check.tensor("x", x, torch.bfloat16)
    check.shape("x", x, None, weight.shape[0], weight.shape[2])
    return _products(x, weight, dtype)


def _products(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """x ``[N, B, I]``, weight ``[B, O, I]``."""
    if dtype not in _RESULTS:
        raise TypeError(f"dtype must be bfloat16 or float32, got {str(dtype).removeprefix('torch.')}")
    check.same_device("x", x, weight)
    if weight.shape[2] > 1 and weight.stride(2) != 1:
        raise ValueError(f"weight must have contiguous rows, got strides {list(weight.stride())}")
    if x.shape[2] > 1 and x.stride(2) != 1:
        x = x.contiguous()
    out = x.new_empty((x.shape[0], weight.shape[0], weight.shape[1]), dtype=dtype)
    if not x.numel() or not out.numel():
        return out.zero_()
    implementation("plain", x).plain_linears(x, weight, out)
    return out
