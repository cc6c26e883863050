"""Calls of csrc/rows.h; nothing is empty."""

from __future__ import annotations

from ctypes import c_int64

from torch import Tensor

from .call import bits, make

NormCall = c_int64 * 7  # QkNorm
AddCall = c_int64 * 4  # QkAdd
RotateCall = c_int64 * 12  # QkRotate


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, out: Tensor) -> None:
    rows, columns = x.shape
    sizes = x.stride(0), rows, columns
    call = NormCall(x.data_ptr(), *sizes, weight.data_ptr(), bits(epsilon), out.data_ptr())
    make("qk_rms_norm", call, x, weight, out)


def add(a: Tensor, b: Tensor, out: Tensor) -> None:
    make("qk_add", AddCall(a.data_ptr(), b.data_ptr(), a.numel(), out.data_ptr()), a, b, out)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool, out: Tensor) -> None:
    tokens, heads, columns = x.shape
    call = RotateCall(
        x.data_ptr(), x.stride(0), x.stride(1), tokens, heads, columns, cos.shape[1], is_interleaved,
        cos.data_ptr(), sin.data_ptr(), cos.stride(0), out.data_ptr(),
    )  # fmt: skip
    make("qk_rotate", call, x, cos, sin, out)
