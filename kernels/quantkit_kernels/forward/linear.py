"""Linears over INT4 and FP8 weights: bfloat16 in and out, float32 sums, any number of rows.

``y = x W^T`` with W as stored: the weight is decoded on its way to the multiplication and never exists whole.
Activations stay bfloat16 (W4A16, W8A16); biases and gradients are left out.

Errors, S = sum of |x||W| over the I inputs: float32 sums are off by at most (I/128 + 16) 2^-24 S, and rounding to
bfloat16 adds at most 2^-8 |y|; over many outputs the root mean square error is below 2^-8.5 of that of y. Products
below 2^-126 may count as zero. The native code gives a row the same bits whatever else is in the batch, for any
number of threads. Inf and NaN in x, codes or scales propagate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import check
from .choice import implementation
from .weights import Fp8Weight, Int4Weight


def int4_linear(x: Tensor, weight: Int4Weight, *, out: Tensor | None = None) -> Tensor:
    """``x W^T``, W = (nibble - 8) * scale.

    Args:
        x: bfloat16 ``[..., I]``.
        weight: ``[O, I]``, group size 32, 64 or 128.
        out: bfloat16 ``[..., O]``, contiguous, to write to.

    Returns:
        bfloat16 ``[..., O]``; errors as in the module's description.

    Raises:
        TypeError, ValueError: an argument does not fit, or ``out`` shares memory with another; it is named.
    """
    if not isinstance(weight, Int4Weight):
        raise TypeError(f"weight must be an Int4Weight, got {type(weight).__name__}")
    result = _checked(x, weight, weight.packed, out)
    if not x.numel() or not result.numel():
        return result.zero_()
    implementation("linear", x).int4_linear(_rows(x), weight, _rows(result))
    return result


def fp8_linear(x: Tensor, weight: Fp8Weight, *, out: Tensor | None = None) -> Tensor:
    """``x W^T``, W = e4m3 code * scale of its block; codes of NaN give NaN.

    Args:
        x: bfloat16 ``[..., I]``.
        weight: ``[O, I]``.
        out: bfloat16 ``[..., O]``, contiguous, to write to.

    Returns:
        bfloat16 ``[..., O]``; errors as in the module's description.

    Raises:
        TypeError, ValueError: an argument does not fit, or ``out`` shares memory with another; it is named.
    """
    if not isinstance(weight, Fp8Weight):
        raise TypeError(f"weight must be an Fp8Weight, got {type(weight).__name__}")
    result = _checked(x, weight, weight.codes, out)
    if not x.numel() or not result.numel():
        return result.zero_()
    implementation("linear", x).fp8_linear(_rows(x), weight, _rows(result))
    return result


def _checked(x: Tensor, weight: Int4Weight | Fp8Weight, stored: Tensor, out: Tensor | None) -> Tensor:
    """The tensor to write to."""
    check.tensor("x", x, torch.bfloat16)
    if x.dim() == 0 or x.shape[-1] != weight.in_features:
        raise ValueError(f"x must have {weight.in_features} columns like weight, got shape {list(x.shape)}")
    check.same_device("x", x, stored)
    size = (*x.shape[:-1], weight.out_features)
    return check.output("out", out, x, size, ("x", x), ("weight", stored), ("weight.scale", weight.scale))


def _rows(x: Tensor) -> Tensor:
    """``[N, I]`` with contiguous rows; a copy only where strides ask for it."""
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()
