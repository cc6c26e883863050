"""What ``checked.py`` makes and the paged operations take in place of a block table and of slots.

Legend: R requests, P entries of a row of the table, T query tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, eq=False)
class CheckedSlots:
    """Slots to store tokens at; made by ``checked.py`` only.

    Attributes:
        slots: int64 ``[T]``.
        capacity: tokens of the pool that they were compared with.
    """

    slots: Tensor
    capacity: int
