"""Multi-head latent attention on the device; twin/mla.py says what it computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantkit_kernels.forward.pages import LATENT, ROPE, MlaLayout

from .cache import mla_rows
from .gqa import CHUNK, LOG2E, combine, workspaces
from .kernels import mla as kernels
from .launch import ceil_div, launch, power_of_2

MAX_HEADS = 64  # of a program: 64 by 512 accumulators are half of the registers of eight warps
MAX_HEADS_BF16 = 32  # 64 need 520 of the 512 columns of sm_100's tensor memory


def mla_decode(
    query_latent: Tensor,
    query_rope: Tensor,
    pages: Tensor,
    layout: MlaLayout,
    block_table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    indices: Tensor | None,
    out: Tensor,
) -> None:
    rows, heads, columns = query_latent.shape
    lengths = lengths.contiguous()
    most = block_table.shape[1] * layout.page_size if indices is None else indices.shape[1]
    count = max(1, ceil_div(most, CHUNK))
    parts, largests, totals = workspaces(query_latent, (rows, heads, count), columns)
    _run(
        query_latent, query_rope, pages, layout, block_table, lengths, lengths, None, None, indices, scale,
        (parts, largests, totals), count, is_prefill=False,
    )  # fmt: skip
    if indices is not None:
        lengths = torch.full_like(lengths, indices.shape[1])
    combine(parts, largests, totals, lengths, CHUNK, out)


def mla_prefill(
    query_latent: Tensor,
    query_rope: Tensor,
    pages: Tensor,
    layout: MlaLayout,
    block_table: Tensor,
    cu_queries: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    fresh_latent: Tensor | None,
    fresh_rope: Tensor | None,
    indices: Tensor | None,
    out: Tensor,
) -> None:
    _run(
        query_latent, query_rope, pages, layout, block_table, cu_queries.contiguous(), lengths.contiguous(),
        fresh_latent, fresh_rope, indices, scale, (out, out, out), 1, is_prefill=True,
    )  # fmt: skip


def _run(
    query: Tensor,
    query_rope: Tensor,
    pages: Tensor,
    layout: MlaLayout,
    block_table: Tensor,
    starts: Tensor,
    lengths: Tensor,
    fresh_latent: Tensor | None,
    fresh_rope: Tensor | None,
    indices: Tensor | None,
    scale: float,
    targets: tuple[Tensor, Tensor, Tensor],
    count: int,
    *,
    is_prefill: bool,
) -> None:
    if (layout.latent, layout.rope) != (LATENT, ROPE):
        raise ValueError(
            f"layout of {layout.latent} and {layout.rope} columns: the kernels take {LATENT} and {ROPE}"
        )
    rows, heads, _ = query.shape
    latent, rope = mla_rows(pages, layout)
    is_fresh = fresh_latent is not None and fresh_rope is not None
    new_latent, new_rope = _rows_of(fresh_latent, query), _rows_of(fresh_rope, query)
    listed, width = (lengths, 0) if indices is None else (indices, indices.shape[1])
    chunk = CHUNK if not is_prefill else block_table.shape[1] * layout.page_size + rows + width
    size, warps = _heads_of(heads, MAX_HEADS if layout.is_fp8 else MAX_HEADS_BF16)
    constants: dict[str, Any] = {
        "FP8": layout.is_fp8, "PREFILL": is_prefill, "FRESH": is_fresh, "SPARSE": indices is not None,
        "PARTS": not is_prefill, "BLOCK_H": size, "BLOCK_T": 16 if layout.is_fp8 else 32,
    }  # fmt: skip
    scales = latent.codes if latent.scales is None else latent.scales
    launch(
        kernels.mla_kernel, (rows, ceil_div(heads, size), count), query, *query.stride(), query_rope,
        *query_rope.stride(), latent.codes, latent.code_strides[0], latent.code_strides[2], rope.codes,
        rope.code_strides[0], rope.code_strides[2], scales, latent.scale_strides[0], latent.scale_strides[2],
        block_table, block_table.stride(0), starts, lengths, new_latent, new_latent.stride(0), new_rope,
        new_rope.stride(0), listed, listed.stride(0), width, *targets, scale * LOG2E, heads, lengths.shape[0],
        layout.page_size, chunk, count, warps=warps, stages=2, **constants,
    )  # fmt: skip


def _heads_of(heads: int, most: int) -> tuple[int, int]:
    """Heads of a program and its warps."""
    size = min(power_of_2(heads, 16), most)
    return size, 4 if size == 16 else 8


def _rows_of(fresh: Tensor | None, instead: Tensor) -> Tensor:
    """``fresh`` with contiguous rows; any tensor where there is none."""
    if fresh is None:
        return instead
    return fresh if fresh.stride(1) == 1 else fresh.contiguous()
