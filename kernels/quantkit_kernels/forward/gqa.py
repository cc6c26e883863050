"""Grouped-query attention over paged keys and values (``pages.GqaLayout``).

Legend: R requests, T query tokens, Hq query heads, Hkv key-value heads, D head size, P entries of a table row.

Query head h reads key-value head h // (Hq / Hkv). Scores, softmax and sums are float32; the native and Triton code
round the softmax's numerators to bf16 before they meet the values, as flash attention does. Against exact
arithmetic on the same pages an output is off by at most 2^-7 of the largest |value| its query sees, 2^-8 of it in
RMS.

A row's bits depend neither on the number of threads nor on the other requests of the batch. NaN and Inf propagate
to the rows that see them and to no other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import check, table
from .checked_table import CheckedTable
from .choice import implementation
from .pages import GqaLayout


def gqa_decode(
    query: Tensor,
    pages: Tensor,
    layout: GqaLayout,
    block_table: Tensor | CheckedTable,
    lengths: Tensor,
    *,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of one query token per request over its whole context.

    Args:
        query: bfloat16 ``[R, Hq, D]``, any strides.
        pages: uint8 ``[N, page_bytes]``; the query's own token is stored already.
        block_table: int32 ``[R, P]``, rows contiguous; entries beyond a request's length may be anything. Or a
            table that was checked for all layers of a step (``checked.py``), with its own tensors as the others.
        lengths: int32 ``[R]``, tokens of each context, the query's own included.
        scale: factor of the scores, usually D^-0.5; finite.
        out: where to write; must not overlap an input.

    Returns:
        bfloat16 ``[R, Hq, D]``; zeros for a request of length 0.

    Raises:
        TypeError, ValueError: dtype, shape, device, alignment, overlap, a length beyond the table, a page outside
            the pool; the message names the argument.
    """
    GqaLayout.expect(layout)
    block_table, _ = table.context(block_table, lengths, layout, pages)
    _query(query, layout, pages, block_table.shape[0])
    scale = check.factor("scale", scale)
    inputs = (("query", query), ("pages", pages), ("block_table", block_table), ("lengths", lengths))
    out = check.output("out", out, query, tuple(query.shape), *inputs)
    if query.numel():
        implementation("gqa", query).gqa_decode(query, pages, layout, block_table, lengths, scale=scale, out=out)
    return out


def gqa_prefill(
    query: Tensor,
    pages: Tensor,
    layout: GqaLayout,
    block_table: Tensor | CheckedTable,
    cu_queries: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    fresh_key: Tensor | None = None,
    fresh_value: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of a chunk of query tokens per request: the last tokens of its context.

    Without ``fresh_*`` all keys and values come from the pages, the chunk's own too (stored before, hence
    rounded). With them the chunk's own tokens are taken in BF16 and only the history before it is read from pages.

    Args:
        query: bfloat16 ``[T, Hq, D]``, the requests' chunks one after the other, any strides.
        pages, block_table, scale, out: as in ``gqa_decode``.
        cu_queries: int32 ``[R+1]``, where each chunk starts; 0 first, T last.
        lengths: int32 ``[R]``, tokens of each context, the chunk included.
        fresh_key, fresh_value: bfloat16 ``[T, Hkv, D]``, any strides; both or none.

    Returns:
        bfloat16 ``[T, Hq, D]``.

    Raises:
        TypeError, ValueError: as ``gqa_decode``; a chunk longer than its context.
    """
    GqaLayout.expect(layout)
    layout.check(pages)
    scale = check.factor("scale", scale)
    tokens = query.shape[0] if isinstance(query, Tensor) and query.dim() else None
    _query(query, layout, pages, tokens)
    inputs = [("query", query), ("pages", pages)]
    if (fresh_key is None) != (fresh_value is None):
        raise ValueError("fresh_key and fresh_value belong together: give both or none")
    for name, fresh in (("fresh_key", fresh_key), ("fresh_value", fresh_value)):
        if fresh is not None:
            check.tensor(name, fresh, torch.bfloat16)
            check.shape(name, fresh, tokens, layout.num_kv_heads, layout.head_dim)
            check.same_device(name, fresh, query)
            inputs.append((name, fresh))
    block_table, _ = table.prefill(
        block_table, cu_queries, lengths, layout, pages, query.shape[0], is_fresh=fresh_key is not None
    )
    inputs += [("block_table", block_table), ("cu_queries", cu_queries), ("lengths", lengths)]
    out = check.output("out", out, query, tuple(query.shape), *inputs)
    if query.numel():
        implementation("gqa", query).gqa_prefill(
            query,
            pages,
            layout,
            block_table,
            cu_queries,
            lengths,
            scale=scale,
            fresh_key=fresh_key,
            fresh_value=fresh_value,
            out=out,
        )
    return out


def _query(query: Tensor, layout: GqaLayout, pages: Tensor, rows: int | None) -> None:
    check.tensor("query", query, torch.bfloat16)
    check.shape("query", query, rows, None, layout.head_dim)
    check.same_device("query", query, pages)
    if query.shape[1] == 0 or query.shape[1] % layout.num_kv_heads:
        raise ValueError(
            f"query has {query.shape[1]} heads, no multiple of the {layout.num_kv_heads} of the pages"
        )
