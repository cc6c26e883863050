"""Logprobs: of the model's own distribution, before anything that sampling does to it.

Legend: n rows, V columns (the vocabulary).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..request import TokenLogprob

BLOCK_VALUES = 1 << 20  # of float64 at once


def logprobs(logits: NDArray[np.float32], tokens: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    """Of each row's token, with the most likely ones.

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
    values = logits.astype(np.float64)
    values -= values.max(axis=1, keepdims=True)
    values -= np.log(np.exp(values).sum(axis=1, keepdims=True))
    chosen = values[np.arange(len(tokens)), tokens]
    ranks = (logits > logits[np.arange(len(tokens)), tokens][:, None]).sum(axis=1) + 1
    return [
        TokenLogprob(token, float(value), int(rank), _top(row, raw, top))
        for token, value, rank, row, raw, top in zip(tokens, chosen, ranks, values, logits, tops, strict=True)
    ]


def _top(row: NDArray[np.float64], raw: NDArray[np.float32], count: int) -> tuple[tuple[int, float], ...]:
    if count == 0:
        return ()
    least = np.partition(raw, raw.size - count)[raw.size - count]
    ids = np.flatnonzero(raw >= least)  # ascending, and so they stay among equals
    ids = ids[np.argsort(-raw[ids], kind="stable")][:count]
    return tuple((int(i), float(row[i])) for i in ids)
