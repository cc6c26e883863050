"""Layouts of a pool of KV pages: uint8 rows that describe themselves, scales inside.

Legend: N pages, S tokens in a page, Hkv key-value heads, D head size.

A pool is a uint8 tensor ``[N, page_bytes]``. A token's *slot* is page * S + offset. Rows are contiguous; their
stride is free (a multiple of 4 bytes), so that the pools of several layers can lie interleaved in one allocation.
``views`` gives the parts of a pool as tensors with element types, without a copy.

FP8 is e4m3 with a float32 scale: value = float32(code) * scale, scale = absmax / 448 over the values that share it
(FP8_ZERO_SCALE if they are all zero), code = nearest even of value / scale, saturating. A value that is not finite
is stored as the NaN code 0x7f and leaves the scale of its neighbours alone: it comes back as NaN, and only it.

Left out: who owns a page (quantkit_serve) and the id of a format, which also depends on the model's rotary
embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from . import check

KV_DTYPES = ("fp8", "bf16")
LATENT = 512  # kv_lora_rank of GLM-5.x and DeepSeek
ROPE = 64  # qk_rope_head_dim
LATENT_BLOCK = 128  # columns of the latent that share a scale
INDEX_DIM = 128  # index_head_dim
_ALIGNMENT = 4  # of a page: its float32 scales


class PageLayout:
    """What the layouts have in common; use one of the subclasses."""

    page_size: int
    kv_dtype: str

    def __post_init__(self) -> None:
        if self.kv_dtype not in KV_DTYPES:
            raise ValueError(f"layout.kv_dtype must be one of {', '.join(KV_DTYPES)}, got {self.kv_dtype!r}")
        for name in ("page_size", "num_kv_heads", "head_dim"):
            if hasattr(self, name):
                check.integer(f"layout.{name}", getattr(self, name))

    @property
    def is_fp8(self) -> bool:
        return self.kv_dtype == "fp8"

    @property
    def page_bytes(self) -> int:
        raise NotImplementedError

    def allocate(self, num_pages: int, device: torch.device | str = "cpu") -> Tensor:
        """A pool of ``num_pages`` pages of zeros, uint8 ``[num_pages, page_bytes]``."""
        return torch.zeros((num_pages, self.page_bytes), dtype=torch.uint8, device=device)

    @classmethod
    def expect(cls, layout: PageLayout) -> None:
        """Refuses what is no layout of this class.

        Raises:
            TypeError: names ``layout``.
        """
        if not isinstance(layout, cls):
            raise TypeError(f"layout must be a {cls.__name__}, got {type(layout).__name__}")

    def check(self, pages: Tensor) -> Tensor:
        """``pages``, if it is a pool of this layout.

        Raises:
            TypeError, ValueError: dtype, shape, strides or alignment do not fit; the message names ``pages``.
        """
        check.matrix("pages", pages, torch.uint8)
        if pages.shape[1] != self.page_bytes:
            raise ValueError(f"pages must have {self.page_bytes} bytes a page for {self}, got {pages.shape[1]}")
        if pages.shape[0] > 1 and (pages.stride(0) < self.page_bytes or pages.stride(0) % _ALIGNMENT):
            raise ValueError(
                f"pages must have a row stride of at least {self.page_bytes} and a multiple of {_ALIGNMENT}, "
                f"got {pages.stride(0)}"
            )
        if pages.data_ptr() % _ALIGNMENT or pages.storage_offset() % _ALIGNMENT:
            raise ValueError(f"pages must start at a multiple of {_ALIGNMENT} bytes")
        return pages


def _part(pages: Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...], steps: tuple[int, ...]) -> Tensor:
    """Bytes from ``start`` of every page as ``[N, *shape]`` of ``dtype``, sharing memory.

    ``steps``: strides inside a page, in elements. A page need not be a multiple of them, so it is no ``view``.
    """
    size = dtype.itemsize
    stride = pages.stride(0) if pages.shape[0] > 1 else -(-pages.shape[1] // _ALIGNMENT) * _ALIGNMENT
    flat = torch.empty(0, dtype=dtype, device=pages.device)
    offset = (pages.storage_offset() + start) // size
    return flat.set_(pages.untyped_storage(), offset, (pages.shape[0], *shape), (stride // size, *steps))


class GqaViews(NamedTuple):
    """A pool of a ``GqaLayout``.

    Attributes:
        key, value: ``[N, Hkv, S, D]``, float8_e4m3fn or bfloat16.
        key_scale, value_scale: float32 ``[N, Hkv, S]``, None in BF16.
    """

    key: Tensor
    value: Tensor
    key_scale: Tensor | None
    value_scale: Tensor | None


@dataclass(frozen=True)
class GqaLayout(PageLayout):
    """Keys and values of grouped-query attention, a scale per token and head in FP8.

    A page: key scales [Hkv, S], value scales [Hkv, S] (FP8 only), keys [Hkv, S, D], values [Hkv, S, D], padding up
    to a multiple of 4 bytes. A head's tokens lie together, as decoding reads them.
    """

    page_size: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: str = "fp8"

    @property
    def page_bytes(self) -> int:
        rows = self.num_kv_heads * self.page_size
        used = rows * 2 * (self.head_dim + 4 if self.is_fp8 else 2 * self.head_dim)
        return -(-used // _ALIGNMENT) * _ALIGNMENT

    def views(self, pages: Tensor) -> GqaViews:
        heads, size, dim = self.num_kv_heads, self.page_size, self.head_dim
        rows = heads * size

        def part(start: int, dtype: torch.dtype) -> Tensor:
            return _part(pages, start, dtype, (heads, size, dim), (size * dim, dim, 1))

        def scale(start: int) -> Tensor:
            return _part(pages, start, torch.float32, (heads, size), (size, 1))

        if not self.is_fp8:
            return GqaViews(part(0, torch.bfloat16), part(rows * dim * 2, torch.bfloat16), None, None)
        first = rows * 8
        key, value = part(first, torch.float8_e4m3fn), part(first + rows * dim, torch.float8_e4m3fn)
        return GqaViews(key, value, scale(0), scale(rows * 4))


class MlaViews(NamedTuple):
    """A pool of an ``MlaLayout``.

    Attributes:
        latent: ``[N, S, L]``, float8_e4m3fn or bfloat16.
        rope: bfloat16 ``[N, S, R]``, rotated already.
        scale: float32 ``[N, S, L / 128]``, one per 128 columns of the latent; None in BF16.
    """

    latent: Tensor
    rope: Tensor
    scale: Tensor | None


@dataclass(frozen=True)
class MlaLayout(PageLayout):
    """The latent of multi-head latent attention, kv_lora_rank 512 and 64 rotary columns.

    A page is S records. FP8 (``fp8_ds_mla`` of vLLM and SGLang), 656 bytes: 512 e4m3, 4 float32 scales, 64 bf16.
    BF16, 1152 bytes: 512 + 64 bf16.

    Attributes:
        latent, rope: columns that are used, L and R; the first of 512 and 64. Records have their size and places
            whatever they are, what is not used is neither written nor read. L is a multiple of 128, R of 16.
    """

    page_size: int
    kv_dtype: str = "fp8"
    latent: int = LATENT
    rope: int = ROPE

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, most, step in (("latent", LATENT, LATENT_BLOCK), ("rope", ROPE, 16)):
            columns = check.integer(f"layout.{name}", getattr(self, name))
            if columns > most or columns % step:
                raise ValueError(f"layout.{name} must be a multiple of {step} up to {most}, got {columns}")

    @property
    def record_bytes(self) -> int:
        return LATENT + 16 + 2 * ROPE if self.is_fp8 else 2 * (LATENT + ROPE)

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.record_bytes

    def views(self, pages: Tensor) -> MlaViews:
        def part(start: int, dtype: torch.dtype, columns: int) -> Tensor:
            steps = (self.record_bytes // dtype.itemsize, 1)
            return _part(pages, start, dtype, (self.page_size, columns), steps)

        if not self.is_fp8:
            rope = part(2 * LATENT, torch.bfloat16, self.rope)
            return MlaViews(part(0, torch.bfloat16, self.latent), rope, None)
        return MlaViews(
            part(0, torch.float8_e4m3fn, self.latent),
            part(LATENT + 16, torch.bfloat16, self.rope),
            part(LATENT, torch.float32, self.latent // LATENT_BLOCK),
        )


class IndexViews(NamedTuple):
    """A pool of an ``IndexLayout``.

    Attributes:
        key: ``[N, S, 128]``, float8_e4m3fn or bfloat16.
        scale: float32 ``[N, S]``, None in BF16.
    """

    key: Tensor
    scale: Tensor | None


@dataclass(frozen=True)
class IndexLayout(PageLayout):
    """Keys of the DSA indexer, one head of 128, a scale per token in FP8.

    A page: keys [S, 128], then scales [S] (FP8 only): 132 bytes a token in FP8, 256 in BF16.
    """

    page_size: int
    kv_dtype: str = "fp8"

    @property
    def page_bytes(self) -> int:
        return self.page_size * (INDEX_DIM + 4 if self.is_fp8 else 2 * INDEX_DIM)

    def views(self, pages: Tensor) -> IndexViews:
        shape, steps = (self.page_size, INDEX_DIM), (INDEX_DIM, 1)
        if not self.is_fp8:
            return IndexViews(_part(pages, 0, torch.bfloat16, shape, steps), None)
        scale = _part(pages, self.page_size * INDEX_DIM, torch.float32, (self.page_size,), (1,))
        return IndexViews(_part(pages, 0, torch.float8_e4m3fn, shape, steps), scale)
