"""Calls of csrc/rows.h; nothing is empty."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from quantkit_kernels.forward import choice
from quantkit_kernels.library import Library

from .call import fail

NormCall = c_int64 * 6  # QkNorm
RotateCall = c_int64 * 12  # QkRotate


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, out: Tensor) -> None:
    rows, columns = x.shape
    call = NormCall(x.data_ptr(), x.stride(0), rows, columns, weight.data_ptr(), out.data_ptr())
    status = _function(choice.library(), "qk_rms_norm", c_float)(call, epsilon, torch.get_num_threads())
    if status:
        fail("qk_rms_norm", status)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool, out: Tensor) -> None:
    tokens, heads, columns = x.shape
    call = RotateCall(
        x.data_ptr(), x.stride(0), x.stride(1), tokens, heads, columns, cos.shape[1], is_interleaved,
        cos.data_ptr(), sin.data_ptr(), cos.stride(0), out.data_ptr(),
    )  # fmt: skip
    status = _function(choice.library(), "qk_rotate")(call, torch.get_num_threads())
    if status:
        fail("qk_rotate", status)


@cache
def _function(library: Library, name: str, *arguments: type) -> Callable[..., int]:
    library.declare({name: (c_void_p, *arguments, c_int)})
    native, level = getattr(library.handle, name), library.level
    return lambda *given: native(level, *given)
