"""Where the parts of a token lie in a page, as csrc/cache.h wants it; the layouts are those of ``pages.py``."""

from __future__ import annotations

from ctypes import Structure, c_int32, c_int64, c_void_p
from functools import cache

from torch import Tensor

from quantkit_kernels.forward.pages import INDEX_DIM, LATENT, LATENT_BLOCK, GqaLayout, IndexLayout, MlaLayout


class Part(Structure):
    """QkPart."""

    _fields_ = (
        ("start", c_int64),
        ("group_stride", c_int64),
        ("token_stride", c_int64),
        ("scale_start", c_int64),
        ("scale_group_stride", c_int64),
        ("scale_token_stride", c_int64),
        ("groups", c_int64),
        ("columns", c_int64),
        ("is_fp8", c_int32),
    )


class Pool(Structure):
    """QkPool."""

    _fields_ = (("pages", c_void_p), ("stride", c_int64), ("page_size", c_int64))


def pool(pages: Tensor, page_size: int) -> Pool:
    return Pool(pages.data_ptr(), pages.stride(0), page_size)


@cache
def gqa_parts(layout: GqaLayout) -> tuple[Part, Part]:
    """Keys and values: a run for each head."""
    heads, size, dim = layout.num_kv_heads, layout.page_size, layout.head_dim
    rows, item = heads * size, 1 if layout.is_fp8 else 2
    first = 8 * rows if layout.is_fp8 else 0

    def part(second: int) -> Part:
        start = first + second * rows * dim * item
        strides = (size * dim * item, dim * item)
        return Part(start, *strides, second * rows * 4, size * 4, 4, heads, dim, layout.is_fp8)

    return part(0), part(1)


@cache
def mla_parts(layout: MlaLayout) -> tuple[Part, Part]:
    """Latent, a run for each scale, and rotary part."""
    record, blocks = layout.record_bytes, layout.latent // LATENT_BLOCK
    if not layout.is_fp8:
        return (
            Part(0, 2 * LATENT_BLOCK, record, 0, 0, 0, blocks, LATENT_BLOCK, 0),
            Part(2 * LATENT, 0, record, 0, 0, 0, 1, layout.rope, 0),
        )
    latent = Part(0, LATENT_BLOCK, record, LATENT, 4, record, blocks, LATENT_BLOCK, 1)
    return latent, Part(LATENT + 16, 0, record, 0, 0, 0, 1, layout.rope, 0)


@cache
def index_part(layout: IndexLayout) -> Part:
    if not layout.is_fp8:
        return Part(0, 0, 2 * INDEX_DIM, 0, 0, 0, 1, INDEX_DIM, 0)
    return Part(0, 0, INDEX_DIM, layout.page_size * INDEX_DIM, 0, 4, 1, INDEX_DIM, 1)
