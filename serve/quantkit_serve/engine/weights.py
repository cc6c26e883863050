"""Probabilities of rows of logits up to a factor, with sums over chunks, so that drawing a token scans few of
them.

In float32, with the largest at 1, so nothing overflows however small the temperature; sums over chunks are in
float32, sums of chunks in float64.

Legend: n rows, V columns (the vocabulary), C chunks of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

CHUNK = 128
LEAST = 1e-30  # of temperatures: below it, and long before, only the largest logit has a weight


class Weights:
    """exp((logit - largest) / temperature).

    Args:
        logits: float32 ``[n, V]``; a largest one exists.
        temperatures: n, above 0.

    Attributes:
        values: float32 ``[n, C * CHUNK]``, zeros after V.
        totals: n sums.
    """

    def __init__(self, logits: NDArray[np.float32], temperatures: Sequence[float]) -> None:
        rows, columns = logits.shape
        chunks = -(-columns // CHUNK)
        self.values = np.zeros((rows, chunks * CHUNK), np.float32)
        used = self.values[:, :columns]
        divisors = np.clip(np.array(temperatures, np.float64), LEAST, 1 / LEAST).astype(np.float32)
        with np.errstate(over="ignore", under="ignore"):
            np.subtract(logits, logits.max(axis=1, keepdims=True), out=used)
            np.divide(used, divisors[:, None], out=used)
            np.exp(used, out=used)
            parts = self.values.reshape(rows, chunks, CHUNK).sum(axis=2)
        self._sums = np.cumsum(parts, axis=1, dtype=np.float64)
        self.totals: list[float] = self._sums[:, -1].tolist()

    def at(self, row: int, number: float) -> int:
        """The column where the cumulative distribution of the row passes a number in [0, 1)."""
        sums = self._sums[row]
        value = min(number * sums[-1], np.nextafter(sums[-1], 0))
        chunk = int(np.searchsorted(sums, value, side="right"))
        inner = np.cumsum(self.values[row, chunk * CHUNK : (chunk + 1) * CHUNK], dtype=np.float64)
        rest = value - (sums[chunk - 1] if chunk else 0.0)
        return chunk * CHUNK + int(np.searchsorted(inner, min(rest, np.nextafter(inner[-1], 0)), side="right"))
