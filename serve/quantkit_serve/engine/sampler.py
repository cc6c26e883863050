"""Next tokens from logits: numpy, rows together where they ask for the same, single rows where they don't.

A draw depends on the row's logits, its parameters, its seed and its position, and on nothing else in the batch:
the random number is that of a counter-based generator (Philox, Salmon et al. 2011) at (seed, position), sums are
in float64 along one row, and the token is where the cumulative distribution, in the order of token ids, passes
it.

Order: repetition penalty (transformers' rule), frequency and presence penalty (OpenAI's), bias, end tokens that
may not come yet, grammar, temperature; then top_k, top_p of what top_k left, and min_p, each of which keeps a
number of the most likely tokens; of equally likely ones those with the lowest ids.

Legend: n rows, V columns (the vocabulary).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..request import SamplingParams

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
BLOCK_VALUES = 1 << 20  # of float64 at once


@dataclass(frozen=True)
class Draw:
    """What a row needs besides its logits.

    Attributes:
        seed: any whole number; the lowest 64 bits count.
        position: of the token that is drawn.
        counts: generated tokens, how often each.
        prompt: for the repetition penalty.
        forbidden: tokens that may not come.
        allowed: bool ``[V]`` of a grammar; None: all.
    """

    params: SamplingParams
    seed: int
    position: int
    counts: Mapping[int, int] = field(default_factory=dict)
    prompt: Sequence[int] = ()
    forbidden: Sequence[int] = ()
    allowed: NDArray[np.bool_] | None = None

    @property
    def has_penalties(self) -> bool:
        params = self.params
        return bool(params.frequency_penalty or params.presence_penalty) or params.repetition_penalty != 1

    @property
    def changes_logits(self) -> bool:
        return (
            self.has_penalties or bool(self.params.logit_bias) or bool(self.forbidden) or self.allowed is not None
        )


def sample(logits: F32, draws: Sequence[Draw]) -> list[int | None]:
    """A token per row; None where none may come.

    Args:
        logits: float32 ``[n, V]``, finite; left as they are.
        draws: n.
    """
    changed = [i for i, draw in enumerate(draws) if draw.changes_logits]
    if changed:
        logits = logits.copy()
        for i in changed:
            _change(logits[i], draws[i])
    best = logits.argmax(axis=1)  # the first of the largest
    tokens: list[int | None] = list(best.tolist())
    for i in changed:
        if logits[i, best[i]] == -np.inf:
            tokens[i] = None
    drawn = [i for i, draw in enumerate(draws) if draw.params.temperature > 0 and tokens[i] is not None]
    for rows in _blocks(drawn, logits.shape[1]):
        for i, token in zip(rows, _draw(logits[rows], [draws[i] for i in rows]), strict=True):
            tokens[i] = token
    return tokens


def uniform(seed: int, position: int) -> float:
    """In [0, 1), 53 bits, of this seed at this position."""
    raw = np.random.Philox(key=seed % (1 << 64), counter=position).random_raw()
    return float((int(raw) >> 11) * 2.0**-53)


def is_finite(logits: F32) -> NDArray[np.bool_]:
    """bool ``[n]``: no NaN and no infinity in the row."""
    return np.asarray(np.isfinite(logits).all(axis=1))


def _blocks(rows: list[int], columns: int) -> Iterator[list[int]]:
    size = max(BLOCK_VALUES // columns, 1)
    return (rows[i : i + size] for i in range(0, len(rows), size))


def _change(row: F32, draw: Draw) -> None:
    """Penalties, bias and what is forbidden, in place."""
    params = draw.params
    if params.repetition_penalty != 1:
        seen = np.unique(np.fromiter({*draw.prompt, *draw.counts}, np.int64))
        values = row[seen]
        row[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if draw.counts and (params.frequency_penalty or params.presence_penalty):
        seen = np.fromiter(draw.counts.keys(), np.int64, len(draw.counts))
        times = np.fromiter(draw.counts.values(), np.float32, len(draw.counts))
        row[seen] -= times * params.frequency_penalty + params.presence_penalty
    for token, bias in params.logit_bias.items():
        row[token] += bias
    if draw.forbidden:
        row[list(draw.forbidden)] = -np.inf
    if draw.allowed is not None:
        row[~draw.allowed] = -np.inf


def _draw(logits: F32, draws: list[Draw]) -> list[int]:
    """Tokens of rows with a temperature."""
    kept = _kept(logits, draws)
    scaled = logits.astype(np.float64)
    scaled -= scaled.max(axis=1, keepdims=True)  # the largest becomes 0: no overflow, however small the divisor
    with np.errstate(over="ignore", under="ignore"):
        scaled /= _column(d.params.temperature for d in draws)
        weights = np.exp(scaled, out=scaled)
    if kept is not None:
        weights *= kept
    sums = np.cumsum(weights, axis=1)
    # strictly below the total, also when the product is rounded up to it
    return [
        int(
            np.searchsorted(
                row, min(uniform(d.seed, d.position) * row[-1], np.nextafter(row[-1], 0)), side="right"
            )
        )
        for d, row in zip(draws, sums, strict=True)
    ]


def _kept(logits: F32, draws: list[Draw]) -> NDArray[np.bool_] | None:
    """bool ``[n, V]`` of the tokens that top_k, top_p and min_p leave; None: all."""
    rows = [i for i, d in enumerate(draws) if d.params.top_k or d.params.top_p < 1 or d.params.min_p > 0]
    if not rows:
        return None
    kept: NDArray[np.bool_] = np.ones(logits.shape, np.bool_)
    some = logits[rows]
    ordered = np.sort(some, axis=1)[:, ::-1]
    counts = [_count(values, draws[i].params) for values, i in zip(ordered, rows, strict=True)]
    least = ordered[np.arange(len(rows)), np.array(counts) - 1]
    kept[rows] = some >= least[:, None]
    for i, values, smallest, count in zip(rows, some, least, counts, strict=True):
        surplus = int(kept[i].sum()) - count
        if surplus:  # more than one has the smallest value: the highest ids go
            kept[i, np.flatnonzero(values == smallest)[-surplus:]] = False
    return kept


def _count(ordered: F32, params: SamplingParams) -> int:
    """How many of the most likely tokens are kept.

    Args:
        ordered: float32 ``[V]``, largest first.
    """
    count = min(params.top_k or len(ordered), len(ordered))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        weights = np.exp((ordered[:count].astype(np.float64) - float(ordered[0])) / params.temperature)
    if params.top_p < 1:
        sums = np.cumsum(weights)
        count = min(int(np.searchsorted(sums, params.top_p * sums[-1], side="left")) + 1, count)
    if params.min_p > 0:
        count = min(count, int(np.searchsorted(-weights, -params.min_p, side="right")))
    return max(count, 1)


def _column(values: Iterator[float]) -> F64:
    return np.fromiter(values, np.float64)[:, None]
