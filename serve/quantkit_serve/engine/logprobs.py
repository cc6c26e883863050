"""Logprobs: of the model's own distribution, before anything that sampling does to it.

Legend: n rows, V columns (the vocabulary).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log

import numpy as np
from numpy.typing import NDArray

from ..request import TokenLogprob
from .weights import Weights

BLOCK_VALUES = 1 << 17  # rows that are computed together: what fits the second-level cache


def logprobs(logits: NDArray[np.float32], tokens: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    """Of each row's token, with the most likely ones; within 1e-6.

    Args:
        logits: float32 ``[n, V]``, finite.
        tokens: n.
        tops: n, how many of the most likely to list; equally likely ones by their ids.
    """
    size = max(BLOCK_VALUES // logits.shape[1], 1)
    found: list[TokenLogprob] = []
    for start in range(0, len(tokens), size):
        block = slice(start, start + size)
        found += _block(logits[block], tokens[block], tops[block])
    return found


def _block(logits: NDArray[np.float32], tokens: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    totals = Weights(logits, [1.0] * len(tokens)).totals
    bases = [float(most) + log(total) for most, total in zip(logits.max(axis=1), totals, strict=True)]
    chosen = logits[np.arange(len(tokens)), tokens]
    ranks = np.count_nonzero(logits > chosen[:, None], axis=1) + 1
    return [
        TokenLogprob(token, float(value) - base, int(rank), _top(row, base, top))
        for token, value, base, rank, row, top in zip(tokens, chosen, bases, ranks, logits, tops, strict=True)
    ]


def _top(row: NDArray[np.float32], base: float, count: int) -> tuple[tuple[int, float], ...]:
    if count == 0:
        return ()
    least = np.partition(row, row.size - count)[row.size - count]
    ids = np.flatnonzero(row >= least)  # ascending, and so they stay among equals
    ids = ids[np.argsort(-row[ids], kind="stable")][:count]
    return tuple((int(i), float(row[i]) - base) for i in ids)
