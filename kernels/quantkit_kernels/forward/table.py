"""Checks of block tables, lengths and slots by their values, before any page is touched.

A wrong page id must never read or write foreign memory, so every number that becomes an address is compared with
the pool here, in numpy (a few microseconds for 64 requests of 256 pages, where torch's operations cost more).
Tensors on a GPU are copied to the host for it, which waits for the stream.

Legend: R requests, P entries of a row of the table, N pages, S tokens in a page, T tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import check
from .pages import PageLayout


def values(tensor: Tensor) -> NDArray[Any]:
    """The numbers, in host memory."""
    return tensor.detach().cpu().numpy()


def slots(value: Tensor, layout: PageLayout, pages: Tensor, tokens: int) -> None:
    """int64 ``[T]``, each -1 (skip) or a slot of the pool, none twice.

    Raises:
        TypeError, ValueError: names ``slots``.
    """
    check.tensor("slots", value, torch.int64)
    check.shape("slots", value, tokens)
    check.same_device("slots", value, pages)
    check.disjoint("pages", pages, "slots", value)
    found = np.sort(values(value))
    capacity = pages.shape[0] * layout.page_size
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


def block_table(value: Tensor, layout: PageLayout, pages: Tensor) -> int:
    """int32 ``[R, P]`` with contiguous rows; the number of tokens that a row can hold."""
    check.matrix("block_table", value, torch.int32)
    check.same_device("block_table", value, pages)
    return int(value.shape[1]) * layout.page_size


def entries(value: Tensor, lengths: NDArray[Any], layout: PageLayout, pages: Tensor) -> None:
    """The entries of the block table that ``lengths`` reaches, one length per row, are pages of the pool.

    Others may hold anything.

    Raises:
        ValueError: names ``block_table``.
    """
    found, num_pages = values(value), pages.shape[0]
    if not found.size or (found.min() >= 0 and found.max() < num_pages):
        return
    used = np.arange(found.shape[1]) < -(-lengths.astype(np.int64) // layout.page_size)[:, None]
    bad = used & ((found < 0) | (found >= num_pages))
    if bad.any():
        row, column = (int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"block_table[{row}, {column}] must be a page in [0, {num_pages}), got {found[row, column]}"
        )


def context(table: Tensor, length: Tensor, layout: PageLayout, pages: Tensor) -> NDArray[Any]:
    """``block_table`` and ``lengths`` int32 ``[R]`` of one another, checked whole; the lengths."""
    layout.check(pages)
    capacity = block_table(table, layout, pages)
    found = lengths("lengths", length, table.shape[0], capacity, pages)
    entries(table, found, layout, pages)
    return found


def prefill(
    table: Tensor,
    cu_queries: Tensor,
    length: Tensor,
    layout: PageLayout,
    pages: Tensor,
    tokens: int,
    *,
    is_fresh: bool,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """``cu_queries`` int32 ``[R+1]`` rises from 0 to T, no chunk is longer than its context, and what is read from
    pages (with ``is_fresh`` the history only) lies in them.

    Returns:
        The numbers of ``cu_queries`` and ``lengths``.

    Raises:
        TypeError, ValueError: names ``cu_queries``, ``lengths`` or ``block_table``.
    """
    capacity = block_table(table, layout, pages)
    limit = capacity if not is_fresh else int(np.iinfo(np.int32).max)
    found = lengths("lengths", length, table.shape[0], limit, pages)
    check.tensor("cu_queries", cu_queries, torch.int32)
    check.shape("cu_queries", cu_queries, len(found) + 1)
    check.same_device("cu_queries", cu_queries, pages)
    starts = values(cu_queries)
    sizes = np.diff(starts.astype(np.int64))
    if starts[0] != 0 or starts[-1] != tokens or (sizes < 0).any():
        raise ValueError(f"cu_queries must rise from 0 to the {tokens} query tokens")
    if (sizes > found).any():
        row = int(np.argmax(sizes > found))
        raise ValueError(f"lengths[{row}] is {found[row]}, fewer than the request's {sizes[row]} queries")
    paged = found - sizes if is_fresh else found
    if (paged > capacity).any():
        raise ValueError(f"lengths must leave at most {capacity} tokens to the pages, got {paged.max()}")
    entries(table, paged, layout, pages)
    return starts, found


def visible(starts: NDArray[Any], lengths: NDArray[Any]) -> NDArray[Any]:
    """int64 ``[T]``: how many tokens each query of a prefill sees, itself included."""
    sizes = starts[1:] - starts[:-1]
    seen: NDArray[np.int64] = np.repeat(lengths.astype(np.int64) - starts[1:], sizes)
    seen += np.arange(1, starts[-1] + 1)
    return seen


def rows(table: Tensor, row: Tensor, length: Tensor, layout: PageLayout, pages: Tensor, tokens: int) -> int:
    """``rows`` and ``lengths`` int32 ``[T]``: each token's row of the table and what it sees of it.

    Returns:
        The largest length.

    Raises:
        TypeError, ValueError: names ``rows``, ``lengths`` or ``block_table``.
    """
    capacity = block_table(table, layout, pages)
    chosen = lengths("rows", row, tokens, table.shape[0] - 1, pages)
    found = lengths("lengths", length, tokens, capacity, pages)
    reach = np.zeros(table.shape[0], np.int64)
    np.maximum.at(reach, chosen, found)
    entries(table, reach, layout, pages)
    return int(found.max()) if found.size else 0


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
