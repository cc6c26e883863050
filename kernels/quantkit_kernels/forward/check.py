"""Checks of tensor arguments, once for all backends: a TypeError or ValueError that names the argument.

A backend may rely on what is checked here and is never handed anything else: a wrong argument can't crash it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import SupportsFloat, SupportsIndex

import torch
from torch import Tensor

LARGEST_INT = 2**31 - 1  # of a size that native code takes in 64 bits: products of two still fit


def tensor(name: str, value: Tensor, *dtypes: torch.dtype, dims: int | None = None) -> Tensor:
    """``value``, if it is a dense tensor of one of ``dtypes`` with ``dims`` dimensions, plain numbers in memory.

    Refused too: a lazy negation (native code would read the numbers behind it), a tensor without memory (meta, or
    a storage that was released), and one that wants a gradient, which no operation here has.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if value.dtype not in dtypes:
        accepted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} must be {accepted}, got {str(value.dtype).removeprefix('torch.')}")
    if value.layout is not torch.strided or value.is_nested:
        found = "a nested tensor" if value.is_nested else f"layout {value.layout}"
        raise TypeError(f"{name} must be a dense tensor, got {found}")
    if dims is not None and value.dim() != dims:
        raise ValueError(f"{name} must have {dims} dimensions, got shape {list(value.shape)}")
    if value.is_neg():
        raise ValueError(f"{name} is a lazy negation; pass {name}.resolve_neg()")
    if value.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires grad, but there are no gradients here; use torch.no_grad() or detach()")
    _in_memory(name, value)
    return value


_needs_memory = True


@contextmanager
def shapes_only() -> Iterator[None]:
    """Inside, tensors may lie on the meta device: for launches that are recorded and never run."""
    global _needs_memory
    _needs_memory = False
    try:
        yield
    finally:
        _needs_memory = True


def _in_memory(name: str, value: Tensor) -> None:
    if value.is_meta and not _needs_memory:
        return
    if not (value.is_cpu or value.is_cuda):
        raise ValueError(f"{name} is on {value.device}, expected on cpu or cuda")
    address = value.data_ptr()
    if not address and value.numel():
        raise ValueError(f"{name} has no memory: its storage was released")
    if address % value.dtype.itemsize:
        raise ValueError(f"{name} is not aligned to its elements of {value.dtype.itemsize} bytes")


def integer(name: str, value: SupportsIndex, least: int = 1) -> int:
    """``value`` as an int of at least ``least`` that native code can compute with."""
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got bool")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}") from None
    if not least <= number <= LARGEST_INT:
        raise ValueError(f"{name} must lie in [{least}, {LARGEST_INT}], got {number}")
    return number


def factor(name: str, value: SupportsFloat) -> float:
    """``value`` as a float, if float32 can hold it."""
    # Asking whether a float is SupportsFloat takes ten microseconds, of some thirty calls in a step.
    if not isinstance(value, float) and (isinstance(value, str) or not isinstance(value, SupportsFloat)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError, RuntimeError) as error:  # of a tensor, as torch has it
        raise TypeError(f"{name} must be one number: {error}") from None
    if not abs(number) <= torch.finfo(torch.float32).max:
        raise ValueError(f"{name} must be a finite float32, got {value}")
    return number


def matrix(name: str, value: Tensor, *dtypes: torch.dtype) -> Tensor:
    """``value``, if it is two-dimensional with contiguous rows; any row stride."""
    tensor(name, value, *dtypes, dims=2)
    if value.shape[1] > 1 and value.stride(1) != 1:
        raise ValueError(f"{name} must have contiguous rows, got strides {list(value.stride())}")
    return value


def shape(name: str, value: Tensor, *expected: int | None) -> Tensor:
    """``value``, if its shape is ``expected``; None stands for any size."""
    found = tuple(value.shape)
    if found == expected:  # the usual case, and a step of a small model makes hundreds of these checks
        return value
    if len(expected) != len(found) or any(e not in (None, n) for e, n in zip(expected, found, strict=True)):
        wanted = ", ".join("any" if e is None else str(e) for e in expected)
        raise ValueError(f"{name} must be of shape [{wanted}], got {list(value.shape)}")
    return value


def expert_ids(name: str, value: Tensor, experts: int) -> None:
    """Refuses numbers outside [0, experts) other than -1; reads the tensor's values."""
    low, high = (int(bound) for bound in value.aminmax()) if value.numel() else (0, 0)
    if low < -1 or high >= experts:
        raise ValueError(f"{name} must be in [0, {experts}) or -1, got {low if low < -1 else high}")


def same_device(name: str, value: Tensor, other: Tensor) -> None:
    if value.device != other.device:
        raise ValueError(f"{name} is on {value.device}, expected on {other.device}")


def output(
    name: str, out: Tensor | None, like: Tensor, size: tuple[int, ...], *inputs: tuple[str, Tensor]
) -> Tensor:
    """``out`` if it fits and overlaps none of ``inputs``; a new contiguous tensor of ``like``'s dtype without."""
    if out is None:
        return like.new_empty(size)
    tensor(name, out, like.dtype)
    shape(name, out, *size)
    same_device(name, out, like)
    if not out.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {list(out.stride())}")
    for other_name, other in inputs:
        if _overlap(out, other):
            raise ValueError(f"{name} shares memory with {other_name}")
    return out


def disjoint(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    """``value``, which is written, shares no memory with ``other``."""
    if _overlap(value, other):
        raise ValueError(f"{name} shares memory with {other_name}")


def apart(name: str, value: Tensor) -> None:
    """The rows of a matrix, which are written, share no memory with one another."""
    if value.shape[0] > 1 and value.stride(0) < value.shape[1]:
        raise ValueError(f"{name} must have rows that do not overlap, got strides {list(value.stride())}")


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the address ranges meet; tensors that interleave count as overlapping."""
    if not a.numel() or not b.numel():
        return False
    (a_first, a_last), (b_first, b_last) = address_range(a), address_range(b)
    return a.device == b.device and a_first < b_last and b_first < a_last


def address_range(value: Tensor) -> tuple[int, int]:
    """The first address of ``value`` and one past its last."""
    reach = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    return value.data_ptr(), value.data_ptr() + (reach + 1) * value.element_size()
