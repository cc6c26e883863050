"""A sequence that is being scored: which tokens it has, which of them are forced through decode steps."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from quantkit_serve.paging import PageRef

from .pair import Pair


@dataclass(eq=False)
class Sequence:
    """Tokens that go into the model for one or several pairs.

    Attributes:
        pairs: indices of the pairs that it scores; they differ in their last token at most.
        tokens: int64, contexts and continuations without the last token, which nothing is asked about.
        first: position whose logits are of the continuation's first token.
        forced: position from which tokens go one by one through decode steps; all of them if none do.
        keys: of the whole pages that prefill makes of the context, each covering all pages before it.
        done: tokens computed.
        refs, slot: its pages, and its row in the block table.
    """

    pairs: list[int]
    tokens: NDArray[np.int64]
    first: int
    forced: int
    keys: list[bytes]
    done: int = 0
    refs: list[PageRef] = field(default_factory=list)
    slot: int = -1

    @property
    def is_prefilled(self) -> bool:
        return self.done >= self.forced

    @property
    def is_done(self) -> bool:
        return self.done == len(self.tokens)

    @property
    def shareable(self) -> list[int]:
        """Tokens of the context whose pages may be another's, or another's own: not the one that is asked first,
        nor those of decode steps."""
        found: list[int] = self.tokens[: min(self.first, self.forced)].tolist()
        return found


def sequences(pairs: SequenceOf[Pair], *, is_forced: bool, decoded_context: int, page_size: int) -> list[Sequence]:
    """Sequences of the pairs, the longest contexts first, equal contexts together.

    Args:
        is_forced: continuations go through decode steps.
        decoded_context: so many last tokens of contexts do, too; the first token of a context never does.
    """
    found: dict[tuple[int, bytes], Sequence] = {}
    order = sorted(range(len(pairs)), key=lambda i: (-len(pairs[i].context), pairs[i].context))
    for index in order:
        pair = pairs[index]
        tokens = np.array(pair.context + pair.continuation[:-1], np.int64)
        size = len(pair.context)
        sequence = found.get(key := (size, tokens.tobytes()))
        if sequence is None:
            forced = max(size - decoded_context, 1) if is_forced else len(tokens)
            keys = _keys(pair.context[: min(size - 1, forced)], page_size)
            sequence = found[key] = Sequence([], tokens, size - 1, min(forced, len(tokens)), keys)
        sequence.pairs.append(index)
    return list(found.values())


def _keys(tokens: SequenceOf[int], page_size: int) -> list[bytes]:
    keys, digest = [], b""
    for end in range(page_size, len(tokens) + 1, page_size):
        digest = blake2b(array("q", tokens[end - page_size : end]).tobytes(), digest_size=16, key=digest).digest()
        keys.append(digest)
    return keys
