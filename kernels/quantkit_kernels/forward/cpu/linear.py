"""Linears of csrc/matmul.h. x ``[N, I]`` with contiguous rows and out ``[N, O]`` contiguous, both not empty.

Between two calls the processor's caches lose everything but weights, so that a line of Python costs ten times what
it does in a loop: what belongs to a weight is worked out once.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_int, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from quantkit_kernels.forward import choice
from quantkit_kernels.forward.weights import Fp8Weight, Int4Weight
from quantkit_kernels.library import Library

from .call import fail

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
    status = function(choice.library(), "qk_linear")(call, torch.get_num_threads())
    if status:
        fail("qk_linear", status)


@cache
def function(library: Library, name: str) -> Callable[..., int]:
    """A function of matmul.h at the library's level: call of numbers, threads -> status."""
    library.declare({name: (c_void_p, c_int)})
    native, level = getattr(library.handle, name), library.level
    return lambda call, threads: native(level, call, threads)
