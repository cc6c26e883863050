"""Writing into and reading from pools of KV pages (``pages.py``): quantize and store, gather, copy.

Legend: T tokens, R requests, P entries of a row of the block table, N pages, S tokens in a page, L the longest
length.

Stored bytes are the same on every backend; gathered values are bf16 (nearest even) of float32(code) * scale.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from . import check, table
from .checked_table import CheckedSlots, CheckedTable
from .choice import implementation
from .pages import INDEX_DIM, GqaLayout, IndexLayout, MlaLayout, PageLayout


def store_gqa(pages: Tensor, layout: GqaLayout, slots: Tensor | CheckedSlots, key: Tensor, value: Tensor) -> None:
    """Store T tokens' keys and values.

    Args:
        pages: uint8 ``[N, page_bytes]``, written in place.
        slots: int64 ``[T]``, page * S + offset; -1 skips a token. Or slots that were checked for all layers of a
            step (``checked.py``).
        key, value: bfloat16 ``[T, Hkv, D]``, any strides; keys rotated already.

    Raises:
        TypeError, ValueError: dtype, shape, device, a slot outside the pool or given twice, or a tensor that
            shares memory with ``pages``; the message names the argument. Nothing is written then.
    """
    GqaLayout.expect(layout)
    layout.check(pages)
    _rows("key", key, pages, None, layout.num_kv_heads, layout.head_dim)
    _rows("value", value, pages, *key.shape)
    slots = table.slots(slots, layout, pages, key.shape[0])
    if key.shape[0]:
        implementation("cache", pages).store_gqa(pages, layout, slots, key, value)


def store_mla(
    pages: Tensor, layout: MlaLayout, slots: Tensor | CheckedSlots, latent: Tensor, rope: Tensor
) -> None:
    """Store T tokens' latents, bfloat16 ``[T, 512]``, and rotated key parts, bfloat16 ``[T, 64]``; less columns
    where the layout uses less.

    The rotary part stays bf16. Everything else as ``store_gqa``.
    """
    MlaLayout.expect(layout)
    layout.check(pages)
    _rows("latent", latent, pages, None, layout.latent)
    _rows("rope", rope, pages, latent.shape[0], layout.rope)
    slots = table.slots(slots, layout, pages, latent.shape[0])
    if latent.shape[0]:
        implementation("cache", pages).store_mla(pages, layout, slots, latent, rope)


def store_index_keys(pages: Tensor, layout: IndexLayout, slots: Tensor | CheckedSlots, keys: Tensor) -> None:
    """Store T tokens' indexer keys, bfloat16 ``[T, 128]``; everything else as ``store_gqa``."""
    IndexLayout.expect(layout)
    layout.check(pages)
    _rows("keys", keys, pages, None, INDEX_DIM)
    slots = table.slots(slots, layout, pages, keys.shape[0])
    if keys.shape[0]:
        implementation("cache", pages).store_index_keys(pages, layout, slots, keys)


def gather_gqa(
    pages: Tensor, layout: GqaLayout, block_table: Tensor | CheckedTable, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values of R requests, in order of position.

    Args:
        pages: uint8 ``[N, page_bytes]``.
        block_table: int32 ``[R, P]``, rows contiguous; entries beyond a request's length may be anything. Or a
            table that was checked (``checked.py``), with its ``lengths``.
        lengths: int32 ``[R]``, tokens of each request.

    Returns:
        key, value: bfloat16 ``[R, L, Hkv, D]``, zeros beyond a request's length.

    Raises:
        TypeError, ValueError: dtype, shape, device, a length beyond P * S, a page outside the pool; the message
            names the argument.
    """
    GqaLayout.expect(layout)
    block_table, longest = _longest(pages, layout, block_table, lengths)
    key, value = implementation("cache", pages).gather_gqa(pages, layout, block_table, lengths, longest)
    return key, value


def gather_mla(
    pages: Tensor, layout: MlaLayout, block_table: Tensor | CheckedTable, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Latents bfloat16 ``[R, L, 512]`` and rotary parts bfloat16 ``[R, L, 64]``; as ``gather_gqa``."""
    MlaLayout.expect(layout)
    block_table, longest = _longest(pages, layout, block_table, lengths)
    latent, rope = implementation("cache", pages).gather_mla(pages, layout, block_table, lengths, longest)
    return latent, rope


def gather_index_keys(
    pages: Tensor, layout: IndexLayout, block_table: Tensor | CheckedTable, lengths: Tensor
) -> Tensor:
    """Indexer keys bfloat16 ``[R, L, 128]``; as ``gather_gqa``."""
    IndexLayout.expect(layout)
    block_table, longest = _longest(pages, layout, block_table, lengths)
    keys: Tensor = implementation("cache", pages).gather_index_keys(pages, layout, block_table, lengths, longest)
    return keys


def copy_pages(pages: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy page ``source[i]`` onto page ``target[i]``, int64 ``[n]`` each, in a pool of any layout.

    Raises:
        TypeError, ValueError: dtype, shape, device, memory shared with ``pages``, a page outside the pool, a
            target given twice or that is a source as well (the result would depend on the order); the message
            names the argument.
    """
    check.matrix("pages", pages, torch.uint8)
    check.apart("pages", pages)
    check.tensor("source", source, torch.int64, dims=1)
    check.tensor("target", target, torch.int64)
    check.shape("target", target, source.shape[0])
    found = []
    for name, ids in (("source", source), ("target", target)):
        check.same_device(name, ids, pages)
        check.disjoint("pages", pages, name, ids)
        found.append(table.values(ids))
        if ids.numel() and (found[-1].min() < 0 or found[-1].max() >= pages.shape[0]):
            raise ValueError(f"{name} must be pages in [0, {pages.shape[0]})")
    if np.unique(found[1]).size < found[1].size or np.isin(found[1], found[0]).any():
        raise ValueError("target must name each page once and none that is in source")
    if source.numel():
        implementation("cache", pages).copy_pages(pages, source, target)


def _rows(name: str, value: Tensor, pages: Tensor, *size: int | None) -> None:
    check.tensor(name, value, torch.bfloat16)
    check.shape(name, value, *size)
    check.same_device(name, value, pages)
    check.disjoint("pages", pages, name, value)


def _longest(
    pages: Tensor, layout: PageLayout, block_table: Tensor | CheckedTable, lengths: Tensor
) -> tuple[Tensor, int]:
    """The table, and the longest length."""
    block_table, found = table.context(block_table, lengths, layout, pages)
    return block_table, int(found.max(initial=0))
