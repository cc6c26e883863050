"""Calls of csrc/attention.h, for ``gqa.py``, ``mla.py`` and ``index.py``."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from .call import make
from .parts import Part, Pool, pool


class Rows(Structure):
    """QkRows."""

    _fields_ = (("data", c_void_p), ("token_stride", c_int64), ("head_stride", c_int64))


class Attention(Structure):
    """QkAttention."""

    _fields_ = (
        ("pool", Pool),
        ("key", Part),
        ("value", Part),
        ("is_latent", c_int32),
        ("is_prefill", c_int32),
        ("table", c_void_p),
        ("table_stride", c_int64),
        ("lengths", c_void_p),
        ("starts", c_void_p),
        ("indices", c_void_p),
        ("indices_stride", c_int64),
        ("num_indices", c_int64),
        ("query", Rows),
        ("query_rope", Rows),
        ("fresh_key", Rows),
        ("fresh_value", Rows),
        ("requests", c_int64),
        ("tokens", c_int64),
        ("heads", c_int64),
        ("scale", c_float),
        ("out", c_void_p),
    )


class IndexScores(Structure):
    """QkIndexScores."""

    _fields_ = (
        ("pool", Pool),
        ("key", Part),
        ("table", c_void_p),
        ("table_stride", c_int64),
        ("rows", c_void_p),
        ("lengths", c_void_p),
        ("query", Rows),
        ("weights", c_void_p),
        ("tokens", c_int64),
        ("heads", c_int64),
        ("longest", c_int64),
        ("out", c_void_p),
    )


IndexTopk = c_int64 * 7  # QkIndexTopk


def packed(value: Tensor) -> Tensor:
    """``value`` with contiguous columns."""
    return value if value.stride(-1) == 1 or value.shape[-1] == 1 else value.contiguous()


def rows(value: Tensor) -> Rows:
    """``[T, H, columns]`` or ``[T, columns]``, columns contiguous."""
    return Rows(value.data_ptr(), value.stride(0), value.stride(1) if value.dim() == 3 else 0)


def attend(
    pages: Tensor,
    page_size: int,
    parts: tuple[Part, Part],
    query: Tensor,
    query_rope: Tensor | None,
    block_table: Tensor,
    lengths: Tensor,
    cu_queries: Tensor | None,
    indices: Tensor | None,
    fresh: tuple[Tensor, Tensor] | None,
    scale: float,
    out: Tensor,
) -> None:
    """One call; without ``cu_queries`` every request has one query that sees its whole context.

    Raises:
        MemoryError: no room for the tiles of each thread.
    """
    requests = len(lengths)
    starts = torch.arange(requests + 1, dtype=torch.int32) if cu_queries is None else cu_queries.contiguous()
    kept = [packed(t) for t in (query, *(() if query_rope is None else (query_rope,)), *(fresh or ()))]
    given = [rows(t) for t in kept]
    none = Rows(None, 0, 0)
    limits = lengths.contiguous()
    call = Attention(
        pool=pool(pages, page_size),
        key=parts[0],
        value=parts[1],
        is_latent=query_rope is not None,
        is_prefill=cu_queries is not None,
        table=block_table.data_ptr(),
        table_stride=block_table.stride(0),
        lengths=limits.data_ptr(),
        starts=starts.data_ptr(),
        indices=None if indices is None else indices.data_ptr(),
        indices_stride=0 if indices is None else indices.stride(0),
        num_indices=0 if indices is None else indices.shape[1],
        query=given[0],
        query_rope=none if query_rope is None else given[1],
        fresh_key=none if fresh is None else given[-2],
        fresh_value=none if fresh is None else given[-1],
        requests=requests,
        tokens=query.shape[0],
        heads=query.shape[1],
        scale=scale,
        out=out.data_ptr(),
    )
    make("qk_attention", call, pages, block_table, limits, starts, indices, *kept, out)


def index_scores(call: IndexScores, *owners: Tensor) -> None:
    make("qk_index_scores", call, *owners)


def index_topk(scores: Tensor, lengths: Tensor, k: int, out: Tensor) -> None:
    limits = lengths.contiguous()
    call = IndexTopk(scores.data_ptr(), scores.stride(0), limits.data_ptr(), *scores.shape, k, out.data_ptr())
    make("qk_index_topk", call, scores, limits, out)
