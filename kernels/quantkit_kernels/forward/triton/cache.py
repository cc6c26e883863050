"""Stores, gathers and page copies on the device; twin/cache.py says what they do."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quantkit_kernels.forward.pages import LATENT_BLOCK, GqaLayout, IndexLayout, MlaLayout

from .kernels import cache as kernels
from .launch import ceil_div, launch, power_of_2


class Rows(NamedTuple):
    """A part of a pool as rows that share a scale: ``[N, heads, S, C]`` by strides in elements.

    codes: uint8 or bfloat16, scales: float32 or None; each with the strides of page, head and token.
    """

    codes: Tensor
    code_strides: tuple[int, int, int]
    scales: Tensor | None
    scale_strides: tuple[int, int, int]
    heads: int
    columns: int

    def arguments(self) -> tuple[Tensor | int, ...]:
        scales = self.codes if self.scales is None else self.scales  # never read without FP8
        return (self.codes, *self.code_strides, scales, *self.scale_strides)


def gqa_rows(pages: Tensor, layout: GqaLayout) -> tuple[Rows, Rows]:
    views = layout.views(pages)
    return _rows(views.key, views.key_scale, (0, 1, 2)), _rows(views.value, views.value_scale, (0, 1, 2))


def mla_rows(pages: Tensor, layout: MlaLayout) -> tuple[Rows, Rows]:
    """Latents, in FP8 cut into the blocks of columns that share a scale, and rotary parts."""
    views = layout.views(pages)
    rope = Rows(
        views.rope, (views.rope.stride(0), 0, views.rope.stride(1)), None, (0, 0, 0), 1, views.rope.shape[2]
    )
    page, token = views.latent.stride(0), views.latent.stride(1)
    if views.scale is None:
        return Rows(views.latent, (page, 0, token), None, (0, 0, 0), 1, views.latent.shape[2]), rope
    blocks = views.latent.shape[2] // LATENT_BLOCK
    steps = (views.scale.stride(0), 1, views.scale.stride(1))
    return Rows(
        as_bytes(views.latent), (page, LATENT_BLOCK, token), views.scale, steps, blocks, LATENT_BLOCK
    ), rope


def index_rows(pages: Tensor, layout: IndexLayout) -> Rows:
    views = layout.views(pages)
    return _rows(views.key, views.scale, (0, None, 1))


def store_gqa(pages: Tensor, layout: GqaLayout, slots: Tensor, key: Tensor, value: Tensor) -> None:
    for rows, x in zip(gqa_rows(pages, layout), (key, value), strict=True):
        _store(rows, layout.page_size, slots, x, x.stride())


def store_mla(pages: Tensor, layout: MlaLayout, slots: Tensor, latent: Tensor, rope: Tensor) -> None:
    latents, ropes = mla_rows(pages, layout)
    token, column = latent.stride()
    _store(latents, layout.page_size, slots, latent, (token, column * LATENT_BLOCK, column))
    _store(ropes, layout.page_size, slots, rope, (rope.stride(0), 0, rope.stride(1)))


def store_index_keys(pages: Tensor, layout: IndexLayout, slots: Tensor, keys: Tensor) -> None:
    _store(index_rows(pages, layout), layout.page_size, slots, keys, (keys.stride(0), 0, keys.stride(1)))


def gather_gqa(
    pages: Tensor, layout: GqaLayout, block_table: Tensor, lengths: Tensor, longest: int
) -> tuple[Tensor, Tensor]:
    key, value = gqa_rows(pages, layout)
    return (
        _gather(key, layout.page_size, block_table, lengths, longest),
        _gather(value, layout.page_size, block_table, lengths, longest),
    )


def gather_mla(
    pages: Tensor, layout: MlaLayout, block_table: Tensor, lengths: Tensor, longest: int
) -> tuple[Tensor, Tensor]:
    latent, rope = mla_rows(pages, layout)
    return (
        _gather(latent, layout.page_size, block_table, lengths, longest).flatten(2),
        _gather(rope, layout.page_size, block_table, lengths, longest).flatten(2),
    )


def gather_index_keys(
    pages: Tensor, layout: IndexLayout, block_table: Tensor, lengths: Tensor, longest: int
) -> Tensor:
    return _gather(index_rows(pages, layout), layout.page_size, block_table, lengths, longest).flatten(2)


def copy_pages(pages: Tensor, source: Tensor, target: Tensor) -> None:
    sizes = (pages.shape[1], pages.stride(0), pages.data_ptr(), pages.storage_offset())
    is_words = not any(size % 4 for size in sizes)
    whole = pages.view(torch.int32) if is_words else pages
    launch(
        kernels.copy_pages_kernel, (source.shape[0], ceil_div(whole.shape[1], 4096)), whole, whole.stride(0),
        source.contiguous(), target.contiguous(), whole.shape[1], BLOCK=4096,
    )  # fmt: skip


def as_bytes(part: Tensor) -> Tensor:
    """FP8 as uint8; kernels decode it themselves."""
    return part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part


def _rows(part: Tensor, scale: Tensor | None, places: tuple[int, int | None, int]) -> Rows:
    """``places``: which dimensions of part and scale are page, head (None: there is one) and token."""

    def steps(of: Tensor) -> tuple[int, int, int]:
        page, head, token = (0 if place is None else of.stride(place) for place in places)
        return page, head, token

    heads = 1 if places[1] is None else part.shape[places[1]]
    none = (0, 0, 0) if scale is None else steps(scale)
    return Rows(as_bytes(part), steps(part), scale, none, heads, part.shape[-1])


def _store(rows: Rows, page_size: int, slots: Tensor, x: Tensor, steps: tuple[int, ...]) -> None:
    launch(
        kernels.store_rows_kernel, (slots.shape[0], rows.heads), slots.contiguous(), x, *steps, *rows.arguments(),
        page_size, rows.columns, FP8=rows.scales is not None, BLOCK=power_of_2(rows.columns), warps=1,
    )  # fmt: skip


def _gather(rows: Rows, page_size: int, block_table: Tensor, lengths: Tensor, longest: int) -> Tensor:
    """bf16 ``[R, longest, heads, C]``."""
    shape = (len(lengths), longest, rows.heads, rows.columns)
    out = torch.empty(shape, dtype=torch.bfloat16, device=lengths.device)
    launch(
        kernels.gather_rows_kernel, (longest, len(lengths), rows.heads), *rows.arguments(), block_table,
        block_table.stride(0), lengths.contiguous(), out, *out.stride()[:3], page_size, rows.columns,
        FP8=rows.scales is not None, BLOCK=power_of_2(rows.columns), warps=1,
    )  # fmt: skip
    return out
