"""What a check is given and gives: the device, random numbers, the comparison with a twin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor


def modules(area: str) -> tuple[Any, Any]:
    """The Triton implementation of an area and its twin."""
    mine, twin = (import_module(f"quantkit_kernels.forward.{folder}.{area}") for folder in ("triton", "twin"))
    return mine, twin


@dataclass(frozen=True)
class Check:
    """One comparison: the largest error over its limit (0 and 0 for bits), or what went wrong."""

    name: str
    ok: bool
    error: float
    limit: float
    seconds: float
    problem: str | None = None


@dataclass(frozen=True)
class Case:
    """What to run: the device, whether sizes are tiny (for the interpreter), and a source of numbers."""

    device: torch.device
    is_tiny: bool
    generator: torch.Generator

    def size(self, full: int, tiny: int) -> int:
        return tiny if self.is_tiny else full

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).bfloat16()

    def to(self, *values: Tensor) -> list[Tensor]:
        return [value.to(self.device) for value in values]


Outcome = tuple[float, float]  # error, limit
Run = Callable[[Case], Iterator[tuple[str, Outcome]]]


def same(found: Tensor, wanted: Tensor) -> Outcome:
    """How many elements differ; any NaN equals any other."""
    found = found.cpu()
    if found.is_floating_point():
        equal = (found == wanted) | (found.isnan() & wanted.isnan())
    else:
        equal = found == wanted
    return float((~equal).sum()), 0.0


def near(found: Tensor, wanted: Tensor, unit: Tensor | float, limit: float) -> Outcome:
    """The largest error in ``unit``; not finite counts as infinite."""
    error = ((found.cpu().double() - wanted.double()).abs() / unit).max() if found.numel() else torch.zeros(())
    return float(error) if error.isfinite() else float("inf"), limit
