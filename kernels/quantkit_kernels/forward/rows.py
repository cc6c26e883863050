"""Norms and rotary embeddings of bfloat16 activations: small things that a layer does many times.

As a handful of torch operations each costs more than the product of a token with a small weight; here it is one
call. A row's bits depend on nothing but the row. Norms differ from the twin by the order of a float32 sum (and so
now and then by one step of bfloat16); rotations have its bits.

Legend: N rows or tokens, H heads, D columns, P pairs of rotary columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import check
from .choice import implementation


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """``weight * bfloat16(x / sqrt(mean(x^2) + epsilon))`` in bfloat16, row by row.

    Args:
        x: bfloat16 ``[N, D]``, contiguous rows.
        weight: float32 ``[D]``.

    Returns:
        bfloat16 ``[N, D]``, contiguous.

    Raises:
        TypeError, ValueError: an argument does not fit; it is named.
    """
    check.matrix("x", x, torch.bfloat16)
    check.tensor("weight", weight, torch.float32)
    check.shape("weight", weight, x.shape[1])
    check.same_device("weight", weight, x)
    epsilon = check.factor("epsilon", epsilon)
    out = x.new_empty(x.shape)
    if x.numel():
        implementation("rows", x).rms_norm(x, weight.contiguous(), epsilon, out)
    return out


def add(a: Tensor, b: Tensor) -> Tensor:
    """``a + b`` in bfloat16, with torch's bits.

    Args:
        a, b: bfloat16 of one shape.

    Returns:
        bfloat16, contiguous.

    Raises:
        TypeError, ValueError: an argument does not fit; it is named.
    """
    check.tensor("a", a, torch.bfloat16)
    check.tensor("b", b, torch.bfloat16)
    check.shape("b", b, *a.shape)
    check.same_device("b", b, a)
    out = a.new_empty(a.shape)
    if a.numel():
        implementation("rows", a).add(a.contiguous(), b.contiguous(), out)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool) -> Tensor:
    """Rotates the first 2 P columns of every head by the token's angles; the others pass.

    Args:
        x: bfloat16 ``[N, H, D]``, contiguous columns.
        cos, sin: float32 ``[N, P]``, contiguous columns, the same strides.
        is_interleaved: pairs are columns 2i and 2i + 1, and come out as i and i + P; else i and i + P.

    Returns:
        bfloat16 ``[N, H, D]``, contiguous. The products are rounded once.

    Raises:
        TypeError, ValueError: an argument does not fit; it is named.
    """
    check.tensor("x", x, torch.bfloat16, dims=3)
    if x.shape[2] > 1 and x.stride(2) != 1:
        raise ValueError(f"x must have contiguous columns, got strides {list(x.stride())}")
    for name, value in (("cos", cos), ("sin", sin)):
        check.matrix(name, value, torch.float32)
        check.shape(name, value, x.shape[0], cos.shape[1])
        check.same_device(name, value, x)
    if 2 * cos.shape[1] > x.shape[2]:
        raise ValueError(f"cos has {cos.shape[1]} pairs, more than {x.shape[2]} columns hold")
    if cos.stride() != sin.stride():
        sin, cos = sin.contiguous(), cos.contiguous()
    out = x.new_empty(x.shape)
    if x.numel():
        implementation("rows", x).rotate(x, cos, sin, is_interleaved, out)
    return out
