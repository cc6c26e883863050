"""Reference of ``forward/gqa.py``: request by request in float32, so a row can't depend on its batch."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit_kernels.forward.pages import GqaLayout

from .cache import read_gqa

QUERIES = 64  # at a time, to bound the scores in memory


def gqa_decode(
    query: Tensor,
    pages: Tensor,
    layout: GqaLayout,
    block_table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    out: Tensor,
) -> None:
    for r, length in enumerate(lengths.tolist()):
        key, value = read_gqa(pages, layout, block_table[r], length)
        out[r] = attend(query[r : r + 1], key, value, length - 1, scale)[0]


def gqa_prefill(
    query: Tensor,
    pages: Tensor,
    layout: GqaLayout,
    block_table: Tensor,
    cu_queries: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    fresh_key: Tensor | None,
    fresh_value: Tensor | None,
    out: Tensor,
) -> None:
    starts = cu_queries.tolist()
    for r, length in enumerate(lengths.tolist()):
        first, last = starts[r], starts[r + 1]
        history = length - (last - first)
        if fresh_key is None or fresh_value is None:
            key, value = read_gqa(pages, layout, block_table[r], length)
        else:
            key, value = read_gqa(pages, layout, block_table[r], history)
            key = torch.cat([key, fresh_key[first:last].float()])
            value = torch.cat([value, fresh_value[first:last].float()])
        for q in range(first, last, QUERIES):
            rows = slice(q, min(q + QUERIES, last))
            out[rows] = attend(query[rows], key, value, history + q - first, scale)


def attend(query: Tensor, key: Tensor, value: Tensor, first: int, scale: float) -> Tensor:
    """bfloat16 ``[T, Hq, Dv]`` of queries at positions ``first``, first + 1, ...; each sees up to its own.

    query: ``[T, Hq, D]``; key: float32 ``[n, Hkv, D]``; value: float32 ``[n, Hkv, Dv]``.
    """
    tokens, heads = query.shape[:2]
    seen = first + tokens
    if seen <= 0:
        return query.new_zeros((tokens, heads, value.shape[-1]))
    if tokens > 1 and not value[:seen].isfinite().all():  # what a query does not see, not even zero may multiply
        return torch.cat([attend(query[t : t + 1], key, value, first + t, scale) for t in range(tokens)])
    q = query.float().reshape(tokens, key.shape[1], -1, query.shape[2]).permute(1, 2, 0, 3)  # [Hkv, G, T, D]
    k, v = key[:seen].permute(1, 2, 0)[:, None], value[:seen].transpose(0, 1)[:, None]
    hidden = torch.arange(seen, device=query.device) > first + torch.arange(tokens, device=query.device)[:, None]
    p = torch.softmax((q @ k * scale).masked_fill(hidden, -torch.inf), -1)
    return (p @ v).permute(2, 0, 1, 3).reshape(tokens, heads, -1).bfloat16()
