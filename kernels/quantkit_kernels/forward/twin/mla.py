"""Reference of ``forward/mla.py``: request by request in float32, so a row can't depend on its batch."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit_kernels.forward.pages import MlaLayout

from .cache import read_mla
from .gqa import QUERIES, attend


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
    for r, length in enumerate(lengths.tolist()):
        latent, rope = read_mla(pages, layout, block_table[r], length)
        if indices is not None:
            latent, rope = _chosen(latent, rope, indices[r])
        out[r] = _attend(query_latent[r : r + 1], query_rope[r : r + 1], latent, rope, len(latent) - 1, scale)[0]


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
    starts = cu_queries.tolist()
    for r, length in enumerate(lengths.tolist()):
        first, last = starts[r], starts[r + 1]
        history = length - (last - first)
        if fresh_latent is None or fresh_rope is None:
            latent, rope = read_mla(pages, layout, block_table[r], length)
        else:
            latent, rope = read_mla(pages, layout, block_table[r], history)
            latent = torch.cat([latent, fresh_latent[first:last].float()])
            rope = torch.cat([rope, fresh_rope[first:last].float()])
        if indices is not None:
            for t in range(first, last):
                row = slice(t, t + 1)
                some = _chosen(latent, rope, indices[t])
                out[row] = _attend(query_latent[row], query_rope[row], *some, len(some[0]) - 1, scale)
            continue
        for q in range(first, last, QUERIES):
            rows = slice(q, min(q + QUERIES, last))
            out[rows] = _attend(query_latent[rows], query_rope[rows], latent, rope, history + q - first, scale)


def _chosen(latent: Tensor, rope: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    used = indices[indices >= 0].long()
    return latent[used], rope[used]


def _attend(
    query_latent: Tensor, query_rope: Tensor, latent: Tensor, rope: Tensor, first: int, scale: float
) -> Tensor:
    """bfloat16 ``[T, H, 512]``: one key-value head of 576 columns, of which the first 512 are the values too."""
    query, key = torch.cat([query_latent, query_rope], -1), torch.cat([latent, rope], -1)
    return attend(query, key[:, None], latent[:, None], first, scale)
