"""Operations of csrc/cache.h; nothing is empty but lengths may be zero."""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from quantkit_kernels.forward.pages import GqaLayout, IndexLayout, MlaLayout, PageLayout

from .call import make, run
from .parts import Part, Pool, gqa_parts, index_part, mla_parts, pool


class Store(Structure):
    """QkStore."""

    _fields_ = (
        ("pool", Pool),
        ("part", Part),
        ("slots", c_void_p),
        ("slot_stride", c_int64),
        ("values", c_void_p),
        ("token_stride", c_int64),
        ("group_stride", c_int64),
        ("tokens", c_int64),
    )


class Gather(Structure):
    """QkGather."""

    _fields_ = (
        ("pool", Pool),
        ("part", Part),
        ("table", c_void_p),
        ("table_stride", c_int64),
        ("lengths", c_void_p),
        ("length_stride", c_int64),
        ("requests", c_int64),
        ("longest", c_int64),
        ("out", c_void_p),
    )


_SIGNATURES: dict[str, list[Any]] = {
    "qk_cache_gather": [POINTER(Gather), c_int],
    "qk_cache_copy": [POINTER(Pool), c_int64, c_void_p, c_void_p, c_int64, c_int],
}


def store_gqa(pages: Tensor, layout: GqaLayout, slots: Tensor, key: Tensor, value: Tensor) -> None:
    for part, values in zip(gqa_parts(layout), (key, value), strict=True):
        _store(pages, layout, part, slots, values)


def store_mla(pages: Tensor, layout: MlaLayout, slots: Tensor, latent: Tensor, rope: Tensor) -> None:
    for part, values in zip(mla_parts(layout), (latent, rope), strict=True):
        _store(pages, layout, part, slots, values.reshape(-1, part.groups, part.columns))


def store_index_keys(pages: Tensor, layout: IndexLayout, slots: Tensor, keys: Tensor) -> None:
    _store(pages, layout, index_part(layout), slots, keys[:, None])


def gather_gqa(
    pages: Tensor, layout: GqaLayout, block_table: Tensor, lengths: Tensor, longest: int
) -> tuple[Tensor, Tensor]:
    key, value = (_gather(pages, layout, part, block_table, lengths, longest) for part in gqa_parts(layout))
    return key, value


def gather_mla(
    pages: Tensor, layout: MlaLayout, block_table: Tensor, lengths: Tensor, longest: int
) -> tuple[Tensor, Tensor]:
    latent, rope = (_gather(pages, layout, part, block_table, lengths, longest) for part in mla_parts(layout))
    return latent.flatten(2), rope.flatten(2)


def gather_index_keys(
    pages: Tensor, layout: IndexLayout, block_table: Tensor, lengths: Tensor, longest: int
) -> Tensor:
    return _gather(pages, layout, index_part(layout), block_table, lengths, longest).flatten(2)


def copy_pages(pages: Tensor, source: Tensor, target: Tensor) -> None:
    origin, goal = source.contiguous(), target.contiguous()
    at = (pages.shape[1], origin.data_ptr(), goal.data_ptr(), len(origin), torch.get_num_threads())
    run(_SIGNATURES, "qk_cache_copy", byref(pool(pages, 1)), *at)


def _store(pages: Tensor, layout: PageLayout, part: Part, slots: Tensor, values: Tensor) -> None:
    """values: bfloat16 ``[T, groups, columns]``."""
    if values.stride(2) != 1:
        values = values.contiguous()
    call = Store(
        pool(pages, layout.page_size),
        part,
        slots.data_ptr(),
        slots.stride(0),
        values.data_ptr(),
        values.stride(0),
        values.stride(1),
        len(values),
    )
    make("qk_cache_store", call, pages, slots, values)


def _gather(
    pages: Tensor, layout: PageLayout, part: Part, block_table: Tensor, lengths: Tensor, longest: int
) -> Tensor:
    out = pages.new_empty((len(lengths), longest, part.groups, part.columns), dtype=torch.bfloat16)
    call = Gather(
        pool(pages, layout.page_size),
        part,
        block_table.data_ptr(),
        block_table.stride(0),
        lengths.data_ptr(),
        lengths.stride(0),
        len(lengths),
        longest,
        out.data_ptr(),
    )
    run(_SIGNATURES, "qk_cache_gather", byref(call), torch.get_num_threads())
    return out
