"""Block tables and slots whose numbers have been compared with a pool, once for all layers of a step.

The paged operations read every page id, length and slot on the host before anything is touched (``table.py``): on
a GPU a wait for the stream in every call, on a CPU some microseconds. A step uses one table in all its layers:

    table = checked_decode(block_table, lengths, page_size=64, num_pages=len(pages))
    for layer in layers:
        gqa_decode(query, layer.pages, layout, table, table.lengths, scale=scale)

An operation then compares only what it can without reading: layout, size of the pool, shapes, and that it is
given the tensors of the table (``table.lengths``, ``.cu_queries``, ``.rows``, ``.visible``) and no others. They
are copies, so that whoever reuses his own buffers can't move a checked page; do not write to them. ``index_topk``
of a table gives positions that attention need not read either.

Legend: R requests, P entries of a row of the table, N pages, S tokens in a page, T query tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from . import check, table
from .checked_table import CheckedSlots, CheckedTable


def checked_decode(block_table: Tensor, lengths: Tensor, *, page_size: int, num_pages: int) -> CheckedTable:
    """A table for operations with one query per request.

    Args:
        block_table: int32 ``[R, P]``, rows contiguous; entries beyond a request's length may be anything.
        lengths: int32 ``[R]``, tokens of each context, the query's own included.
        page_size: S, of the layouts that it will be used with.
        num_pages: N, of the pools at least.

    Raises:
        TypeError, ValueError: dtype, shape, device, a length beyond the table, a page outside the pool; the
            message names the argument.
    """
    size, pages = check.integer("page_size", page_size), check.integer("num_pages", num_pages, 0)
    block_table, lengths = _copy("block_table", block_table), _copy("lengths", lengths)
    found = table.context_values(block_table, lengths, size, pages)
    rows = torch.arange(len(found), dtype=torch.int32, device=block_table.device)
    return CheckedTable(block_table, lengths, None, rows, lengths, size, pages, False, found.copy())


def checked_prefill(
    block_table: Tensor,
    cu_queries: Tensor,
    lengths: Tensor,
    *,
    page_size: int,
    num_pages: int,
    is_fresh: bool = False,
) -> CheckedTable:
    """A table for operations with a chunk of queries per request.

    Args:
        block_table, lengths, page_size, num_pages: as in ``checked_decode``; the chunk counts in ``lengths``.
        cu_queries: int32 ``[R+1]``, where each chunk starts; 0 first.
        is_fresh: the chunk's own tokens need no pages; it can then only be used where ``fresh_*`` are given.

    Raises:
        TypeError, ValueError: as ``checked_decode``; a chunk longer than its context.
    """
    size, pages = check.integer("page_size", page_size), check.integer("num_pages", num_pages, 0)
    block_table, lengths = _copy("block_table", block_table), _copy("lengths", lengths)
    cu_queries = _copy("cu_queries", cu_queries)
    starts, found = table.prefill_values(block_table, cu_queries, lengths, size, pages, None, is_fresh=is_fresh)
    limits = table.visible(starts, found).astype(np.int32)
    rows = np.repeat(np.arange(len(found), dtype=np.int32), np.diff(starts))
    row, seen = (torch.from_numpy(part.copy()).to(block_table.device) for part in (rows, limits))
    return CheckedTable(block_table, lengths, cu_queries, row, seen, size, pages, bool(is_fresh), limits)


def checked_slots(slots: Tensor, *, page_size: int, num_pages: int) -> CheckedSlots:
    """Slots for the ``store_*`` operations of all layers.

    Args:
        slots: int64 ``[T]``, page * S + offset; -1 skips a token.
        page_size, num_pages: as in ``checked_decode``.

    Raises:
        TypeError, ValueError: dtype, shape, a slot outside the pool or given twice; the message names ``slots``.
    """
    capacity = check.integer("page_size", page_size) * check.integer("num_pages", num_pages, 0)
    slots = _copy("slots", slots)
    table.slot_values(slots, capacity)
    return CheckedSlots(slots, capacity)


def _copy(name: str, value: Tensor) -> Tensor:
    return check.tensor(name, value, torch.int64 if name == "slots" else torch.int32).clone()
