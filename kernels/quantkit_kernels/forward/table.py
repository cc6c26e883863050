"""Checks of block tables, lengths and slots by their values, before any page is touched.

A wrong page id must never read or write foreign memory, so every number that becomes an address is compared with
the pool here, in numpy (a few microseconds for 64 requests of 256 pages, where torch's operations cost more).
Tensors on a GPU are copied to the host for it, which waits for the stream: ``checked.py`` does it once for a step.

Legend: R requests, P entries of a row of the table, N pages, S tokens in a page, T tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import check
from .checked_table import CheckedSlots, CheckedTable
from .pages import PageLayout
from .recorder import refuse


def values(tensor: Tensor) -> NDArray[Any]:
    """The numbers, in host memory."""
    refuse("a check by numbers")
    return tensor.detach().cpu().numpy()


def slots(value: Tensor | CheckedSlots, layout: PageLayout, pages: Tensor, tokens: int) -> Tensor:
    """int64 ``[T]``, each -1 (skip) or a slot of the pool, none twice.

    Raises:
        TypeError, ValueError: names ``slots``.
    """
    capacity = pages.shape[0] * layout.page_size
    found = value.slots if isinstance(value, CheckedSlots) else value
    check.tensor("slots", found, torch.int64)
    check.shape("slots", found, tokens)
    check.same_device("slots", found, pages)
    check.disjoint("pages", pages, "slots", found)
    if not isinstance(value, CheckedSlots):
        slot_values(found, capacity)
    elif value.capacity > capacity:
        raise ValueError(f"slots were checked for {value.capacity} tokens, pages hold {capacity}")
    return found


def slot_values(value: Tensor, capacity: int) -> None:
    """Refuses slots outside [0, capacity) other than -1, and those given twice; names ``slots``."""
    check.tensor("slots", value, torch.int64, dims=1)
    found = np.sort(values(value))
    if found.size and (found[0] < -1 or found[-1] >= capacity):
        raise ValueError(f"slots must lie in [0, {capacity}) or be -1, got {found[0]} to {found[-1]}")
    if ((found[1:] == found[:-1]) & (found[1:] >= 0)).any():
        raise ValueError("slots names a slot twice; which token wins would be undefined")


def lengths(name: str, value: Tensor, count: int, limit: int, of: Tensor) -> NDArray[Any]:
    """int32 ``[count]``, each in [0, limit]; the numbers."""
    check.tensor(name, value, torch.int32)
    check.shape(name, value, count)
    check.same_device(name, value, of)
    found = values(value)
    if found.size and (found.min() < 0 or found.max() > limit):
        raise ValueError(f"{name} must lie in [0, {limit}], got {found.min()} to {found.max()}")
    return found


def entries(value: Tensor, lengths: NDArray[Any], page_size: int, num_pages: int) -> None:
    """The entries of the block table that ``lengths`` reaches, one length per row, are pages of the pool.

    Others may hold anything.

    Raises:
        ValueError: names ``block_table``.
    """
    found = values(value)
    if not found.size or (found.min() >= 0 and found.max() < num_pages):
        return
    used = np.arange(found.shape[1]) < -(-lengths.astype(np.int64) // page_size)[:, None]
    bad = used & ((found < 0) | (found >= num_pages))
    if bad.any():
        row, column = (int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"block_table[{row}, {column}] must be a page in [0, {num_pages}), got {found[row, column]}"
        )


def context(
    table: Tensor | CheckedTable, length: Tensor, layout: PageLayout, pages: Tensor
) -> tuple[Tensor, NDArray[Any]]:
    """``block_table`` and ``lengths`` int32 ``[R]`` of one another, checked whole; the table, and the lengths."""
    layout.check(pages)
    if isinstance(table, CheckedTable):
        _fits(table, layout, pages, lengths=(length, table.lengths))
        if table.cu_queries is not None:
            raise ValueError("block_table was checked for a prefill; use checked_decode")
        return table.block_table, table.limits
    check.matrix("block_table", table, torch.int32)
    check.same_device("block_table", table, pages)
    return table, context_values(table, length, layout.page_size, pages.shape[0])


def context_values(table: Tensor, length: Tensor, page_size: int, num_pages: int) -> NDArray[Any]:
    """What ``context`` reads."""
    check.matrix("block_table", table, torch.int32)
    found = lengths("lengths", length, table.shape[0], table.shape[1] * page_size, table)
    entries(table, found, page_size, num_pages)
    return found


def prefill(
    table: Tensor | CheckedTable,
    cu_queries: Tensor,
    length: Tensor,
    layout: PageLayout,
    pages: Tensor,
    tokens: int,
    *,
    is_fresh: bool,
) -> tuple[Tensor, NDArray[Any]]:
    """``cu_queries`` int32 ``[R+1]`` rises from 0 to T, no chunk is longer than its context, and what is read from
    pages (with ``is_fresh`` the history only) lies in them.

    Returns:
        The table, and how many tokens each query sees.

    Raises:
        TypeError, ValueError: names ``cu_queries``, ``lengths`` or ``block_table``.
    """
    if not isinstance(table, CheckedTable):
        check.matrix("block_table", table, torch.int32)
        check.same_device("block_table", table, pages)
        size, num_pages = layout.page_size, pages.shape[0]
        found = prefill_values(table, cu_queries, length, size, num_pages, tokens, is_fresh=is_fresh)
        return table, visible(*found)
    if table.cu_queries is None:
        raise ValueError("block_table was checked for a decode; use checked_prefill")
    _fits(table, layout, pages, lengths=(length, table.lengths), cu_queries=(cu_queries, table.cu_queries))
    if table.is_fresh and not is_fresh:
        raise ValueError("block_table was checked for fresh keys and values, which are not given")
    if table.limits.size != tokens:
        raise ValueError(f"cu_queries must rise from 0 to the {tokens} query tokens, not {table.limits.size}")
    return table.block_table, table.limits


def prefill_values(
    table: Tensor,
    cu_queries: Tensor,
    length: Tensor,
    page_size: int,
    num_pages: int,
    tokens: int | None,
    *,
    is_fresh: bool,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """What ``prefill`` reads: ``cu_queries`` and ``lengths``; any number of tokens where that is None."""
    check.matrix("block_table", table, torch.int32)
    capacity = table.shape[1] * page_size
    limit = capacity if not is_fresh else int(np.iinfo(np.int32).max)
    found = lengths("lengths", length, table.shape[0], limit, table)
    check.tensor("cu_queries", cu_queries, torch.int32)
    check.shape("cu_queries", cu_queries, len(found) + 1)
    check.same_device("cu_queries", cu_queries, table)
    starts = values(cu_queries)
    last = starts[-1] if tokens is None else tokens
    sizes = np.diff(starts.astype(np.int64))
    if starts[0] != 0 or starts[-1] != last or (sizes < 0).any():
        raise ValueError(f"cu_queries must rise from 0 to the {last} query tokens")
    if (sizes > found).any():
        row = int(np.argmax(sizes > found))
        raise ValueError(f"lengths[{row}] is {found[row]}, fewer than the request's {sizes[row]} queries")
    paged = found - sizes if is_fresh else found
    if (paged > capacity).any():
        raise ValueError(f"lengths must leave at most {capacity} tokens to the pages, got {paged.max()}")
    entries(table, paged, page_size, num_pages)
    return starts, found


def visible(starts: NDArray[Any], lengths: NDArray[Any]) -> NDArray[Any]:
    """int64 ``[T]``: how many tokens each query of a prefill sees, itself included."""
    sizes = starts[1:] - starts[:-1]
    seen: NDArray[np.int64] = np.repeat(lengths.astype(np.int64) - starts[1:], sizes)
    seen += np.arange(1, starts[-1] + 1)
    return seen


def rows(
    table: Tensor | CheckedTable, row: Tensor, length: Tensor, layout: PageLayout, pages: Tensor, tokens: int
) -> tuple[Tensor, int]:
    """``rows`` and ``lengths`` int32 ``[T]``: each token's row of the table and what it sees of it.

    Returns:
        The table, and the largest length.

    Raises:
        TypeError, ValueError: names ``rows``, ``lengths`` or ``block_table``.
    """
    if isinstance(table, CheckedTable):
        _fits(table, layout, pages, rows=(row, table.rows), lengths=(length, table.visible))
        if table.is_fresh:
            raise ValueError("block_table was checked for fresh keys and values, which are not given")
        check.shape("lengths", length, tokens)
        return table.block_table, int(table.limits.max(initial=0))
    check.matrix("block_table", table, torch.int32)
    check.same_device("block_table", table, pages)
    chosen = lengths("rows", row, tokens, table.shape[0] - 1, pages)
    found = lengths("lengths", length, tokens, table.shape[1] * layout.page_size, pages)
    reach = np.zeros(table.shape[0], np.int64)
    np.maximum.at(reach, chosen, found)
    entries(table, reach, layout.page_size, pages.shape[0])
    return table, int(found.max(initial=0))


def _fits(table: CheckedTable, layout: PageLayout, pages: Tensor, **given: tuple[Tensor, Tensor]) -> None:
    """A checked table and this pool belong together, and what is given beside it is its own."""
    check.same_device("block_table", table.block_table, pages)
    if table.page_size != layout.page_size or table.num_pages > pages.shape[0]:
        raise ValueError(
            f"block_table was checked for {table.num_pages} pages of {table.page_size} tokens, "
            f"pages are {pages.shape[0]} of {layout.page_size}"
        )
    for name, (found, own) in given.items():
        if found is not own:
            raise ValueError(f"{name} must be the tensor of the checked block_table")


def indices(value: Tensor, rows: int, limits: NDArray[Any], of: Tensor) -> None:
    """int32 ``[rows, K]``, contiguous rows, each entry -1 or a position below the limit of its row.

    Raises:
        TypeError, ValueError: names ``indices``.
    """
    check.matrix("indices", value, torch.int32)
    check.shape("indices", value, rows, None)
    check.same_device("indices", value, of)
    found = values(value)
    if found.size and (found.min() < -1 or (found.max(axis=1) >= limits).any()):
        raise ValueError("indices must be -1 or positions that their query sees")
