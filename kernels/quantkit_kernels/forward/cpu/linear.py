"""Linears of csrc/matmul.h. x ``[N, I]`` with contiguous rows and out ``[N, O]`` contiguous, both not empty."""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from quantkit_kernels.forward import choice
from quantkit_kernels.forward.weights import Fp8Weight, Int4Weight

NO_MEMORY = 4


class Format(Structure):
    """QkFormat of matmul.h."""

    _fields_ = (("is_int4", c_int64), ("block_rows", c_int64), ("block_columns", c_int64))


class Call(Structure):
    """QkLinear of matmul.h."""

    _fields_ = (
        ("format", Format),
        ("codes", c_void_p),
        ("stride", c_int64),
        ("scale", c_void_p),
        ("scale_stride", c_int64),
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("rows", c_int64),
        ("out", c_void_p),
    )


def int4_linear(x: Tensor, weight: Int4Weight, out: Tensor) -> None:
    _linear(x, weight, weight.packed, out)


def fp8_linear(x: Tensor, weight: Fp8Weight, out: Tensor) -> None:
    _linear(x, weight, weight.codes, out)


def format_of(weight: Int4Weight | Fp8Weight) -> Format:
    if isinstance(weight, Int4Weight):
        return Format(1, 1, weight.group_size)
    return Format(0, *weight.block)


def _linear(x: Tensor, weight: Int4Weight | Fp8Weight, stored: Tensor, out: Tensor) -> None:
    call = Call(
        format_of(weight),
        stored.data_ptr(),
        stored.stride(0),
        weight.scale.data_ptr(),
        weight.scale.stride(0),
        weight.out_features,
        weight.in_features,
        x.data_ptr(),
        x.stride(0),
        x.shape[0],
        out.data_ptr(),
    )
    library = choice.library()
    library.declare({"qk_linear": (POINTER(Call), c_int)})
    if library.call("qk_linear", byref(call), torch.get_num_threads()) == NO_MEMORY:
        raise MemoryError(f"no memory for the activations of a linear, {list(x.shape)}")
