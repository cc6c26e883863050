"""Linears of csrc/matmul.h. x ``[N, I]`` with contiguous rows and out ``[N, O]`` contiguous, both not empty."""

from __future__ import annotations

from ctypes import c_int64

from torch import Tensor

from quantkit_kernels.forward.weights import Fp8Weight, Int4Weight

from .call import make

Call = c_int64 * 13  # QkLinear of matmul.h: numbers and addresses of eight bytes each


def int4_linear(x: Tensor, weight: Int4Weight, out: Tensor) -> None:
    _linear(1, x, weight, out)


def fp8_linear(x: Tensor, weight: Fp8Weight, out: Tensor) -> None:
    _linear(0, x, weight, out)


def _linear(is_int4: int, x: Tensor, weight: Int4Weight | Fp8Weight, out: Tensor) -> None:
    rows, columns = x.shape
    call = Call(
        is_int4, *weight.address, weight.out_features, columns, x.data_ptr(), x.stride(0), rows, out.data_ptr()
    )
    make("qk_linear", call, weight, x, out)
