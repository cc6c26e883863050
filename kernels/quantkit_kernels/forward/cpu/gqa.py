"""Grouped-query attention by csrc/attention.h."""

from __future__ import annotations

from torch import Tensor

from quantkit_kernels.forward.pages import GqaLayout

from .attention import attend
from .parts import gqa_parts


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
    place = pages, layout.page_size, gqa_parts(layout)
    attend(*place, query, None, block_table, lengths, None, None, None, scale, out)


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
    fresh = None if fresh_key is None or fresh_value is None else (fresh_key, fresh_value)
    place = pages, layout.page_size, gqa_parts(layout)
    attend(*place, query, None, block_table, lengths, cu_queries, None, fresh, scale, out)
