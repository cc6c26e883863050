"""Multi-head latent attention by csrc/attention.h."""

from __future__ import annotations

from torch import Tensor

from quantkit_kernels.forward.pages import MlaLayout

from .attention import attend
from .parts import mla_parts


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
    if indices is not None and not indices.shape[1]:
        out.zero_()
        return
    place = pages, layout.page_size, mla_parts(layout)
    attend(*place, query_latent, query_rope, block_table, lengths, None, indices, None, scale, out)


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
    if indices is not None and not indices.shape[1]:
        out.zero_()
        return
    place = pages, layout.page_size, mla_parts(layout)
    fresh = None if fresh_latent is None or fresh_rope is None else (fresh_latent, fresh_rope)
    attend(*place, query_latent, query_rope, block_table, lengths, cu_queries, indices, fresh, scale, out)
