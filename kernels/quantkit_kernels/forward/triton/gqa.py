"""Grouped-query attention on the device; twin/gqa.py says what it computes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quantkit_kernels.forward.pages import GqaLayout

from .cache import Rows, gqa_rows
from .kernels import attention
from .kernels import gqa as kernels
from .launch import ceil_div, launch, power_of_2

CHUNK = 512  # tokens of a part: fixed, so that a row's bits don't depend on its batch
LOG2E = math.log2(math.e)


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
    key, value, lengths = *gqa_rows(pages, layout), lengths.contiguous()
    rows, heads, columns = query.shape
    group = heads // layout.num_kv_heads
    count = ceil_div(block_table.shape[1] * layout.page_size, CHUNK)
    parts, largests, totals = workspaces(query, (rows, heads, count), columns)
    launch(
        kernels.gqa_decode_kernel, (rows, layout.num_kv_heads, count), query, *query.stride(),
        *_pools(key, value), block_table, block_table.stride(0), lengths, parts, largests, totals, scale * LOG2E,
        heads, group, columns, layout.page_size, count, CHUNK=CHUNK, FP8=layout.is_fp8,
        BLOCK_H=power_of_2(group, 16), BLOCK_T=64, BLOCK_D=power_of_2(columns, 16), warps=4, stages=3,
    )  # fmt: skip
    combine(parts, largests, totals, lengths, CHUNK, out)


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
    key, value = gqa_rows(pages, layout)
    tokens, heads, columns = query.shape
    requests, block = lengths.shape[0], 128
    is_fresh = fresh_key is not None and fresh_value is not None
    fresh = (query if fresh_key is None else fresh_key, query if fresh_value is None else fresh_value)
    launch(
        kernels.gqa_prefill_kernel, (tokens // block + requests, heads), query, *query.stride(),
        *_pools(key, value), block_table, block_table.stride(0), cu_queries.contiguous(), lengths.contiguous(),
        fresh[0], *fresh[0].stride(), fresh[1], *fresh[1].stride(), out, scale * LOG2E, heads, requests,
        heads // layout.num_kv_heads, columns, layout.page_size, FP8=layout.is_fp8, FRESH=is_fresh, BLOCK_M=block,
        BLOCK_T=32, BLOCK_D=power_of_2(columns, 16), warps=8, stages=2,
    )  # fmt: skip


def workspaces(like: Tensor, shape: tuple[int, int, int], columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """float32 ``[rows, heads, parts, columns]`` and twice ``[rows, heads, parts]``."""
    sizes = ((*shape, columns), shape, shape)
    parts, largests, totals = (torch.empty(size, dtype=torch.float32, device=like.device) for size in sizes)
    return parts, largests, totals


def combine(parts: Tensor, largests: Tensor, totals: Tensor, lengths: Tensor, chunk: int, out: Tensor) -> None:
    rows, heads, count, columns = parts.shape
    launch(
        attention.combine_kernel, (rows, heads), parts, largests, totals, lengths, out, heads, chunk, count,
        columns, BLOCK=power_of_2(columns, 32), warps=1 if columns <= 128 else 4,
    )  # fmt: skip


def _pools(key: Rows, value: Rows) -> tuple[Tensor | int, ...]:
    """Keys, values, their strides of page and head, their scales and those; tokens are next to each other."""
    scales = (key.codes, value.codes) if key.scales is None or value.scales is None else (key.scales, value.scales)
    return (key.codes, value.codes, *key.code_strides[:2], *scales, *key.scale_strides[:2])
