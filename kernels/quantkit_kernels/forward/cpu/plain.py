"""``qk_plain_linear`` of csrc/matmul.h.

x ``[N, B, I]`` and weight ``[B, O, I]`` with contiguous rows, out ``[N, B, O]`` contiguous, none of them empty.
"""

from __future__ import annotations

from ctypes import c_int64

import torch
from torch import Tensor

from .call import make

Call = c_int64 * 14  # QkPlainLinear


def plain_linears(x: Tensor, weight: Tensor, out: Tensor) -> None:
    rows, products, columns = x.shape
    call = Call(
        products, weight.data_ptr(), weight.stride(0), weight.stride(1), weight.shape[1], columns,
        x.data_ptr(), x.stride(1), x.stride(0), rows,
        out.dtype is torch.float32, out.data_ptr(), out.stride(1), out.stride(0),
    )  # fmt: skip
    make("qk_plain_linear", call, x, weight, out)
