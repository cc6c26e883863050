"""Next tokens from logits: numpy, rows together where they ask for the same, single rows where they don't.

A draw depends on the row's logits, its parameters, its seed and its position, and on nothing else in the batch:
the random number is a hash (BLAKE2b, RFC 7693) of (seed, position), sums go along one row in one order, and the
token is where the cumulative distribution passes the number. (A hash is a counter-based generator as good as any,
and takes a microsecond where numpy's Philox takes twenty to set up.)

Order: repetition penalty (transformers' rule), frequency and presence penalty (OpenAI's), bias, end tokens that
may not come yet, grammar, temperature; then top_k, top_p of what top_k left, and min_p, each of which keeps a
number of the most likely tokens; of equally likely ones those with the lowest ids.

Legend: n rows, V columns (the vocabulary), C chunks of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from struct import pack
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..request import SamplingParams
from .weights import Weights

F32 = NDArray[np.float32]
BLOCK_VALUES = 1 << 17  # rows that are drawn together: what fits the second-level cache
# Tokens at least this likely, relative to the best one, are sorted first; few are enough for nearly all rows.
CUTS = (1e-2, 1e-4, 1e-6, 0.0)
MOST = 1e30  # of a logit that a penalty makes


class Draw(NamedTuple):
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
    counts: Mapping[int, int] = MappingProxyType({})
    prompt: Sequence[int] = ()
    forbidden: Sequence[int] = ()
    allowed: NDArray[np.bool_] | None = None

    @property
    def changes_logits(self) -> bool:
        params = self.params
        return params.has_penalties or bool(params.logit_bias or self.forbidden) or self.allowed is not None

    @property
    def is_filtered(self) -> bool:
        return bool(self.params.top_k) or self.params.top_p < 1 or self.params.min_p > 0


def sample(logits: F32, draws: Sequence[Draw]) -> list[int | None]:
    """A token per row; None where none may come.

    Args:
        logits: float32 ``[n, V]``, finite; left as they are.
        draws: n.
    """
    changed, drawn = [], []
    for i, draw in enumerate(draws):
        if draw.changes_logits:
            changed.append(i)
        if draw.params.temperature > 0:
            drawn.append(i)
    if changed:
        logits = logits.copy()
        for i in changed:
            _change(logits[i], draws[i])
    best = logits.argmax(axis=1)  # the first of the largest
    tokens: list[int | None] = list(best.tolist())
    for i in changed:
        if logits[i, best[i]] == -np.inf:
            tokens[i] = None
    for rows in _blocks([i for i in drawn if tokens[i] is not None], logits.shape[1]):
        weights = Weights(logits[rows], [draws[i].params.temperature for i in rows])
        for row, i in enumerate(rows):
            tokens[i] = _draw(weights, row, logits[i], draws[i])
    return tokens


def uniform(seed: int, position: int) -> float:
    """In [0, 1), 53 bits, of this seed at this position."""
    digest = blake2b(pack("<QQ", seed % (1 << 64), position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def is_finite(logits: F32) -> NDArray[np.bool_]:
    """bool ``[n]``: no NaN and no infinity in the row."""
    return np.asarray(np.isfinite(logits).all(axis=1))


def _blocks(rows: list[int], columns: int) -> Iterator[list[int]]:
    size = max(BLOCK_VALUES // columns, 1)
    return (rows[i : i + size] for i in range(0, len(rows), size))


def _change(row: F32, draw: Draw) -> None:
    """Penalties, bias and what is forbidden, in place.

    Only what is forbidden becomes infinite: a tiny penalty makes a large logit.
    """
    params = draw.params
    if params.repetition_penalty != 1:
        seen = np.fromiter({*draw.prompt, *draw.counts}, np.int64)
        values, penalty = row[seen].astype(np.float64), params.repetition_penalty
        with np.errstate(over="ignore"):
            row[seen] = np.clip(np.where(values > 0, values / penalty, values * penalty), -MOST, MOST)
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


def _draw(weights: Weights, row: int, logits: F32, draw: Draw) -> int:
    number = uniform(draw.seed, draw.position)
    if not draw.is_filtered:
        return weights.at(row, number)
    tokens = _kept(weights, row, logits, draw.params)
    sums = np.cumsum(weights.values[row, tokens], dtype=np.float64)
    return int(tokens[_place(sums, number * sums[-1])])


def _kept(weights: Weights, row: int, logits: F32, params: SamplingParams) -> NDArray[np.int64]:
    """Tokens that top_k, top_p and min_p leave, the most likely first."""
    values, total = weights.values[row, : len(logits)], weights.totals[row]
    most = min(params.top_k or len(logits), len(logits))
    for cut in CUTS:
        tokens = np.flatnonzero(values >= cut)
        if cut <= params.min_p or (len(tokens) >= params.top_k > 0):
            break
        if not params.top_k and params.top_p < 1 and values[tokens].sum(dtype=np.float64) >= params.top_p * total:
            break
    tokens = tokens[np.argsort(-logits[tokens], kind="stable")][:most]  # of equals the lowest id comes first
    kept = values[tokens].astype(np.float64)
    count = len(kept)
    if params.top_p < 1:
        sums = np.cumsum(kept)
        count = int(np.searchsorted(sums, params.top_p * (sums[-1] if params.top_k else total))) + 1
    if params.min_p > 0:
        count = min(count, int(np.searchsorted(-kept, -params.min_p, side="right")))
    return tokens[: max(count, 1)]


def _place(sums: NDArray[np.float64], value: float) -> int:
    """First entry above the value, which may have been rounded up to the last one."""
    return int(np.searchsorted(sums, min(value, np.nextafter(sums[-1], 0)), side="right"))
