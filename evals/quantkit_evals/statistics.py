"""A mean over blocks with its standard error; the only statistics of this package so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean of equal-sized blocks.

    Attributes:
        value: the mean.
        stderr: standard error of the mean over the blocks (sample standard deviation / sqrt(blocks)); NaN for one
            block, of which nothing can be said.
    """

    value: float
    stderr: float

    @classmethod
    def of(cls, blocks: Sequence[float]) -> Mean:
        """Mean and standard error of one value per block; raises ValueError for no blocks."""
        if not blocks:
            raise ValueError("the mean of no blocks")
        n = len(blocks)
        mean = math.fsum(blocks) / n
        if n == 1:
            return cls(mean, math.nan)
        return cls(mean, math.sqrt(math.fsum((x - mean) ** 2 for x in blocks) / (n - 1) / n))

    def __str__(self) -> str:
        return f"{self.value:.4g} ± {self.stderr:.2g}"
