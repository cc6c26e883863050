"""Elementwise functions whose result for a value depends on nothing but the value.

torch computes exponentials by vectors and what is left behind the last whole vector, of a tensor or of a thread's
share of it, by another function that differs in the last bit. So columns are filled up to whole vectors, and a
call is kept below the size from which torch splits it between threads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_COLUMNS = 64  # two vectors of 32 bfloat16
_ELEMENTS = 32768  # torch's grain size


def by_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function`` of x ``[T, C]``."""
    rows, columns = x.shape
    padded = torch.nn.functional.pad(x, (0, -columns % _COLUMNS)) if columns % _COLUMNS else x.contiguous()
    step = max(1, _ELEMENTS // padded.shape[1])
    found = torch.cat([function(part) for part in torch.split(padded, step)]) if rows > step else function(padded)
    return found[:, :columns]


def silu(x: Tensor) -> Tensor:
    """``x / (1 + e^-x)`` of ``[T, C]``."""
    return by_rows(torch.nn.functional.silu, x)


def sigmoid(x: Tensor) -> Tensor:
    """``1 / (1 + e^-x)`` of ``[T, C]``."""
    return by_rows(torch.sigmoid, x)
