"""The DSA indexer by csrc/attention.h."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit_kernels.forward.pages import IndexLayout

from . import attention
from .parts import index_part, pool


def index_scores(
    query: Tensor,
    head_weights: Tensor,
    pages: Tensor,
    layout: IndexLayout,
    block_table: Tensor,
    rows: Tensor,
    lengths: Tensor,
    longest: int,
) -> Tensor:
    scores = query.new_empty((len(query), longest), dtype=torch.float32)
    packed = attention.packed(query)
    weights, row, limits = (t.contiguous() for t in (head_weights, rows, lengths))
    attention.index_scores(
        attention.IndexScores(
            pool(pages, layout.page_size),
            index_part(layout),
            block_table.data_ptr(),
            block_table.stride(0),
            row.data_ptr(),
            limits.data_ptr(),
            attention.rows(packed),
            weights.data_ptr(),
            *query.shape[:2],
            longest,
            scores.data_ptr(),
        ),
        *(pages, block_table, row, limits, packed, weights, scores),
    )
    return scores


def index_topk(scores: Tensor, lengths: Tensor, k: int) -> Tensor:
    chosen = lengths.new_empty((len(scores), k))
    attention.index_topk(scores, lengths, k, chosen)
    return chosen
