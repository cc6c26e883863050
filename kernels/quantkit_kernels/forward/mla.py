"""Multi-head latent attention in its absorbed form over paged latents (``pages.MlaLayout``), dense or sparse.

Legend: R requests, T query tokens, H heads, K chosen positions, P entries of a table row; 512 and 64 stand for the
columns that a layout uses (``MlaLayout.latent`` and ``rope``).

All heads read one latent per token: score = scale * (q_latent . latent + q_rope . rope), output = sum of p *
latent, both in the latent's 512 columns (the caller absorbs the up-projections into query and output). Scores,
softmax and sums are float32; the native and Triton code round the softmax's numerators, times the latent's scale,
to bf16. Against exact arithmetic on the same pages an output is off by at most 2^-7 of the largest |latent| its
query sees, 2^-8 of it in RMS. A row's bits depend neither on the number of threads nor on the other requests of
the batch. NaN and Inf propagate to the rows that see them and to no other.
"""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from . import check, table
from .checked_table import CheckedTable, ChosenPositions
from .choice import implementation
from .pages import MlaLayout


def mla_decode(
    query_latent: Tensor,
    query_rope: Tensor,
    pages: Tensor,
    layout: MlaLayout,
    block_table: Tensor | CheckedTable,
    lengths: Tensor,
    *,
    scale: float,
    indices: Tensor | ChosenPositions | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of one query token per request.

    Args:
        query_latent: bfloat16 ``[R, H, 512]``, any strides.
        query_rope: bfloat16 ``[R, H, 64]``, any strides.
        pages: uint8 ``[N, page_bytes]``; the query's own token is stored already.
        block_table: int32 ``[R, P]``, rows contiguous; entries beyond a request's length may be anything. Or a
            table that was checked for all layers of a step (``checked.py``), with its own tensors as the others.
        lengths: int32 ``[R]``, tokens of each context, the query's own included.
        scale: factor of the scores; finite.
        indices: int32 ``[R, K]``, rows contiguous: the positions to attend to, each below the request's length, -1
            for none; a position given twice counts twice. Or what ``index_topk`` chose by this very
            table. None: all.
        out: where to write; must not overlap an input.

    Returns:
        bfloat16 ``[R, H, 512]``; zeros for a request that attends to nothing.

    Raises:
        TypeError, ValueError: dtype, shape, device, alignment, overlap, a length beyond the table, a page outside
            the pool, an index outside the context; the message names the argument.
    """
    MlaLayout.expect(layout)
    scale = check.factor("scale", scale)
    given = block_table
    block_table, found = table.context(block_table, lengths, layout, pages)
    _query(query_latent, query_rope, layout, pages, block_table.shape[0])
    inputs = [*_inputs(query_latent, query_rope, pages), ("block_table", block_table), ("lengths", lengths)]
    positions = _positions(indices, given, block_table.shape[0], found, pages)
    if positions is not None:
        inputs.append(("indices", positions))
    out = check.output("out", out, query_latent, tuple(query_latent.shape), *inputs)
    if query_latent.numel():
        implementation("mla", query_latent).mla_decode(
            query_latent,
            query_rope,
            pages,
            layout,
            block_table,
            lengths,
            scale=scale,
            indices=positions,
            out=out,
        )
    return out


def mla_prefill(
    query_latent: Tensor,
    query_rope: Tensor,
    pages: Tensor,
    layout: MlaLayout,
    block_table: Tensor | CheckedTable,
    cu_queries: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    fresh_latent: Tensor | None = None,
    fresh_rope: Tensor | None = None,
    indices: Tensor | ChosenPositions | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of a chunk of query tokens per request: the last tokens of its context.

    Without ``fresh_*`` everything comes from the pages, the chunk's own tokens too (stored before, hence rounded).
    With them the chunk's own tokens are taken in BF16 and only the history before it is read from pages.

    Args:
        query_latent, query_rope: bfloat16 ``[T, H, 512]`` and ``[T, H, 64]``, the requests' chunks one after the
            other, any strides.
        pages, block_table, scale, out: as in ``mla_decode``.
        cu_queries: int32 ``[R+1]``, where each chunk starts; 0 first, T last.
        lengths: int32 ``[R]``, tokens of each context, the chunk included.
        fresh_latent, fresh_rope: bfloat16 ``[T, 512]`` and ``[T, 64]``, any strides; both or none.
        indices: int32 ``[T, K]``, as in ``mla_decode``, none after the query's own position.

    Returns:
        bfloat16 ``[T, H, 512]``; zeros for a query that attends to nothing.

    Raises:
        TypeError, ValueError: as ``mla_decode``; a chunk longer than its context.
    """
    MlaLayout.expect(layout)
    layout.check(pages)
    scale = check.factor("scale", scale)
    tokens = query_latent.shape[0] if isinstance(query_latent, Tensor) and query_latent.dim() else None
    _query(query_latent, query_rope, layout, pages, tokens)
    inputs = _inputs(query_latent, query_rope, pages)
    if (fresh_latent is None) != (fresh_rope is None):
        raise ValueError("fresh_latent and fresh_rope belong together: give both or none")
    for name, fresh, columns in (
        ("fresh_latent", fresh_latent, layout.latent),
        ("fresh_rope", fresh_rope, layout.rope),
    ):
        if fresh is not None:
            check.tensor(name, fresh, torch.bfloat16)
            check.shape(name, fresh, tokens, columns)
            check.same_device(name, fresh, pages)
            inputs.append((name, fresh))
    rows, given = query_latent.shape[0], block_table
    block_table, found = table.prefill(
        block_table, cu_queries, lengths, layout, pages, rows, is_fresh=fresh_latent is not None
    )
    inputs += [("block_table", block_table), ("cu_queries", cu_queries), ("lengths", lengths)]
    positions = _positions(indices, given, rows, found, pages)
    if positions is not None:
        inputs.append(("indices", positions))
    out = check.output("out", out, query_latent, tuple(query_latent.shape), *inputs)
    if query_latent.numel():
        implementation("mla", query_latent).mla_prefill(
            query_latent,
            query_rope,
            pages,
            layout,
            block_table,
            cu_queries,
            lengths,
            scale=scale,
            fresh_latent=fresh_latent,
            fresh_rope=fresh_rope,
            indices=positions,
            out=out,
        )
    return out


def _positions(
    indices: Tensor | ChosenPositions | None,
    given: Tensor | CheckedTable,
    rows: int,
    limits: NDArray[Any],
    pages: Tensor,
) -> Tensor | None:
    """``indices`` by their numbers, read unless they were chosen by the table ``given``."""
    if isinstance(indices, ChosenPositions):
        if indices.table is given:
            return indices.positions
        indices = indices.positions
    if indices is not None:
        table.indices(indices, rows, limits, pages)
    return indices


def _query(query_latent: Tensor, query_rope: Tensor, layout: MlaLayout, pages: Tensor, rows: int | None) -> None:
    check.tensor("query_latent", query_latent, torch.bfloat16)
    check.shape("query_latent", query_latent, rows, None, layout.latent)
    check.same_device("query_latent", query_latent, pages)
    check.tensor("query_rope", query_rope, torch.bfloat16)
    check.shape("query_rope", query_rope, *query_latent.shape[:2], layout.rope)
    check.same_device("query_rope", query_rope, pages)


def _inputs(query_latent: Tensor, query_rope: Tensor, pages: Tensor) -> list[tuple[str, Tensor]]:
    return [("query_latent", query_latent), ("query_rope", query_rope), ("pages", pages)]
