"""What ``checked.py`` makes and the paged operations take in place of a block table and of slots.

Legend: R requests, P entries of a row of the table, T query tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, eq=False)
class CheckedTable:
    """A block table with what is read of it; made by ``checked.py`` only.

    Attributes:
        block_table: int32 ``[R, P]``.
        lengths: int32 ``[R]``, tokens of each context.
        cu_queries: int32 ``[R+1]``, where each chunk of queries starts; None when decoding.
        rows: int32 ``[T]``, each query's row of the table.
        visible: int32 ``[T]``, tokens that each query sees, itself included; ``lengths`` when decoding.
        page_size, num_pages: what the numbers were compared with.
        is_fresh: only the history before each chunk was: the chunk's own tokens must be given as ``fresh_*``.
        limits: ``visible``, in host memory.
        is_held: made by ``hold``.
    """

    block_table: Tensor
    lengths: Tensor
    cu_queries: Tensor | None
    rows: Tensor
    visible: Tensor
    page_size: int
    num_pages: int
    is_fresh: bool
    limits: NDArray[Any]
    is_held: bool = False

    @property
    def capacity(self) -> int:
        """Tokens that a row of the table has room for."""
        return self.block_table.shape[1] * self.page_size

    @property
    def longest(self) -> int:
        """The most that a query sees."""
        return int(self.limits.max(initial=0))

    def hold(self, entries: int) -> CheckedTable:
        """A copy with rows of ``entries``, to be filled again by ``refill``; of a table for decoding.

        Raises:
            ValueError: rows that don't fit, or a table for prefill.
        """
        if self.cu_queries is not None:
            raise ValueError("only a table for decoding can be held")
        table, lengths = self.block_table.new_zeros((len(self.lengths), entries)), self.lengths.clone()
        held = CheckedTable(
            table, lengths, None, self.rows.clone(), lengths, self.page_size, self.num_pages, False,
            self.limits.copy(), is_held=True,
        )  # fmt: skip
        held.refill(self)
        return held

    def refill(self, other: CheckedTable) -> None:
        """What ``other``, checked for the same pool, holds: the same tensors with its numbers.

        Raises:
            ValueError: not made by ``hold``, another pool or number of requests, contexts longer than the rows.
        """
        if not self.is_held or other.cu_queries is not None:
            raise ValueError("only a held table can be filled again, with one for decoding")
        size = other.page_size, other.num_pages, len(other.lengths)
        if size != (self.page_size, self.num_pages, len(self.lengths)):
            raise ValueError(f"a table of another pool or batch: page size, pages, requests are {size}")
        if other.longest > self.capacity:
            raise ValueError(f"contexts of up to {other.longest} tokens, room for {self.capacity}")
        used = -(-other.longest // self.page_size)
        self.block_table[:, :used].copy_(other.block_table[:, :used])
        self.lengths.copy_(other.lengths)
        np.copyto(self.limits, other.limits)


@dataclass(frozen=True, eq=False)
class CheckedSlots:
    """Slots to store tokens at; made by ``checked.py`` only.

    Attributes:
        slots: int64 ``[T]``.
        capacity: tokens of the pool that they were compared with.
    """

    slots: Tensor
    capacity: int

    def hold(self) -> CheckedSlots:
        """A copy, to be filled again by ``refill``."""
        return CheckedSlots(self.slots.clone(), self.capacity)

    def refill(self, other: CheckedSlots) -> None:
        """The same tensor with the numbers of ``other``.

        Raises:
            ValueError: of another pool, or another number of tokens.
        """
        if (other.capacity, len(other.slots)) != (self.capacity, len(self.slots)):
            raise ValueError(f"{len(other.slots)} slots of a pool of {other.capacity} tokens")
        self.slots.copy_(other.slots)


@dataclass(frozen=True, eq=False)
class ChosenPositions:
    """What ``index_topk`` chose for the queries of a table; made by it only.

    Every position is one that its query sees, because it is chosen among those: nothing is left to be read.

    Attributes:
        positions: int32 ``[T, K]``, ascending, then -1.
        table: whose queries.
    """

    positions: Tensor
    table: CheckedTable
