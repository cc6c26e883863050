"""What the fake model computes: hashes of a history, and logits that follow from them. No torch, so that a fake
worker starts at once."""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np
from numpy.typing import NDArray

from quantkit_serve.batch import Batch
from quantkit_serve.phase import Phase

VOCAB = 61
EOS = 3
PAGE_BYTES = 1000
MASK = (1 << 64) - 1


def mix(*values: int) -> int:
    """A 64-bit hash (splitmix64's finalizer, chained)."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = (state ^ (value & MASK)) * 0xBF58476D1CE4E5B9 & MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & MASK
        state ^= state >> 31
    return state


def stored(token: int, position: int, phase: Phase, history: int) -> int:
    return mix(token, position, phase is Phase.PREFILL, history)


def fold(values: Sequence[int]) -> int:
    """Of a history: depends on each value and its place."""
    return sum(mix(value, place) for place, value in enumerate(values)) & MASK


def logits_of(history: int, vocab: int = VOCAB) -> NDArray[np.float32]:
    return np.random.Generator(np.random.Philox(key=history)).standard_normal(vocab, np.float32) * 3


def compute(
    pages: NDArray[np.uint64], batch: Batch, broken: Container[int] = (), vocab: int = VOCAB
) -> NDArray[np.float32]:
    """A step over pages ``[N, S]``; logits ``[n, vocab]``, with NaN after a token of ``broken``."""
    page_size = pages.shape[1]
    wanted = set(batch.logit_rows.tolist())
    logits = []
    for row, (start, end) in enumerate(zip(batch.cu_tokens[:-1], batch.cu_tokens[1:], strict=True)):
        table = batch.block_table[row].tolist()
        length = int(batch.lengths[row])
        places = [(table[p // page_size], p % page_size) for p in range(length)]
        first = int(batch.positions[start])
        sums = fold([int(pages[place]) for place in places[:first]])
        for i in range(start, end):
            position = int(batch.positions[i])
            value = stored(int(batch.token_ids[i]), position, batch.phase, sums)
            pages[places[position]] = value
            sums = (sums + mix(value, position)) & MASK
            if i in wanted:
                logits.append(logits_of(sums, vocab))
                if int(batch.token_ids[i]) in broken:
                    logits[-1][5] = np.nan
        assert length == position + 1
    assert len(logits) == len(batch.logit_rows)
    return np.array(logits, np.float32).reshape(-1, vocab)
