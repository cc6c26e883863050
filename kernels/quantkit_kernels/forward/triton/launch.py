"""Launching kernels, in one place: devices, options, and a recorder for compiling ahead of time.

Contraction to fused multiply-adds is off everywhere: kernels write ``tl.fma`` where they want one, so that two
configurations of a kernel round alike.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor

from quantkit_kernels.forward.check import shapes_only


@dataclass(frozen=True)
class Launch:
    """One launch as it was asked for: kernel, positional arguments, compile-time constants and options."""

    kernel: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)


_recorded: list[Launch] | None = None
_interpreter = threading.Lock()  # it patches modules while a kernel runs


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int = 4, stages: int = 3, **constants: Any
) -> None:
    """Run ``kernel`` on the device of its tensors, or note it while ``recording``.

    Raises:
        ValueError: the tensors are in host memory and the interpreter is off.
    """
    if 0 in grid:
        return
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
    if _recorded is not None:
        _recorded.append(Launch(kernel, arguments, constants, options))
        return
    device = next(value.device for value in arguments if isinstance(value, Tensor))
    if device.type != "cuda" and not is_interpreted():
        raise ValueError(
            f"Triton kernels run on a GPU, but the tensors are on {device}; TRITON_INTERPRET=1 runs them there"
        )
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with current, _interpreter if is_interpreted() else nullcontext():
        kernel[grid](*arguments, **constants, **options)


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1 before the first import)."""
    return bool(triton.knobs.runtime.interpret)


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Inside, launches are appended to the list and don't run; tensors may be on the ``meta`` device."""
    global _recorded
    found: list[Launch] = []
    _recorded = found
    try:
        with shapes_only():
            yield found
    finally:
        _recorded = None


def power_of_2(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least ``n`` and ``least``."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
