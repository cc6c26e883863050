"""Figures over blocks with their standard errors: means, and quantiles of what is in the blocks.

Blocks are the unit because neighbouring tokens depend on each other; tokens counted as independent would give
errors that are too small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RESAMPLES = 200


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


@dataclass(frozen=True, slots=True)
class Quantile:
    """A quantile of values that come in blocks.

    Attributes:
        value: the quantile over all values.
        stderr: its standard error by the bootstrap over whole blocks (200 draws, the same ones every time); NaN
            for one block.
    """

    value: float
    stderr: float

    @classmethod
    def of(cls, values: NDArray[np.float64], q: float) -> Quantile:
        """Quantile ``q`` (0 to 1) of values ``[blocks, tokens]``; raises ValueError for no blocks."""
        import numpy as np

        if not values.size:
            raise ValueError("a quantile of no blocks")
        value = float(np.quantile(values, q))
        if len(values) == 1:
            return cls(value, math.nan)
        draws = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
        return cls(value, float(np.std([np.quantile(values[draw], q) for draw in draws], ddof=1)))

    def __str__(self) -> str:
        return f"{self.value:.4g} ± {self.stderr:.2g}"
