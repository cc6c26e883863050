"""The DSA indexer on the device; twin/index.py says what it computes.

The k-th largest rank comes from ``torch.topk``: its value is exact whichever of equals it names. A kernel decides
which positions are chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit_kernels.forward.pages import IndexLayout

from .cache import index_rows
from .kernels import index as kernels
from .launch import ceil_div, launch, power_of_2


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
    keys = index_rows(pages, layout)
    tokens, heads, _ = query.shape
    out = torch.empty((tokens, longest), dtype=torch.float32, device=query.device)
    scales = keys.codes if keys.scales is None else keys.scales
    launch(
        kernels.index_scores_kernel, (tokens, ceil_div(longest, 128)), query, *query.stride(), head_weights,
        *head_weights.stride(), keys.codes, keys.code_strides[0], scales, keys.scale_strides[0], block_table,
        block_table.stride(0), rows.contiguous(), lengths.contiguous(), out, longest, heads, layout.page_size,
        FP8=layout.is_fp8, BLOCK_H=min(64, power_of_2(heads, 16)), BLOCK_T=128, warps=4, stages=2,
    )  # fmt: skip
    return out


def index_topk(scores: Tensor, lengths: Tensor, k: int) -> Tensor:
    tokens, columns = scores.shape
    keys = torch.empty((tokens, columns), dtype=torch.int32, device=scores.device)
    grid = (tokens, ceil_div(columns, 1024))
    launch(
        kernels.rank_keys_kernel, grid, scores, scores.stride(0), lengths.contiguous(), keys, columns, BLOCK=1024
    )
    least = torch.topk(keys, min(k, columns), dim=1, sorted=False).values.amin(1)
    chosen = torch.full((tokens, k), -1, dtype=torch.int32, device=scores.device)
    launch(kernels.select_kernel, (tokens,), keys, least, chosen, columns, k, BLOCK=1024, warps=8)
    return chosen
