"""The scale grid of each quantization method: a method *is* its grid.

Per group, the candidates are ``bf16_rne(float32(absmax / 7.5) * factor)``; the candidate with the smallest
summed squared error wins, the earlier one on a tie. ``rtn`` has the one factor 1 (FORMAT section 3),
and ``mse`` can never be worse than it (1 is its first candidate).
"""

from __future__ import annotations

import numpy as np

from .types import F32


def _mse_factors() -> F32:
    grid = [1.0, *(k / 80 for k in range(86, 47, -1) if k != 80)]
    return np.asarray(grid, dtype=np.float32)


METHODS: dict[str, F32] = {"rtn": np.ones(1, dtype=np.float32), "mse": _mse_factors()}
for _factors in METHODS.values():
    _factors.setflags(write=False)


def factors_of(method: str) -> F32:
    """Factors of a method, float32 ``[C]``, the first is 1.

    Raises:
        ValueError: unknown method.
    """
    try:
        return METHODS[method]
    except KeyError:
        raise ValueError(f"unknown method {method!r}; known: {', '.join(METHODS)}") from None
