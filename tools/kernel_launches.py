"""The launches of every Triton kernel at the shapes of GLM-5.2, for compiling them ahead of time.

Operations run on tensors of the ``meta`` device while the launcher records: so configurations, alignments and
compile-time constants are those of real calls, and an operation that waited for the device would fail here.

Legend: hidden 6144, experts of 2048, 64 heads, 512 + 64 latent columns, pages of 64 tokens; GQA as in Qwen3, 64
query and 4 key-value heads of 128.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit_kernels.forward.pages import GqaLayout, IndexLayout, MlaLayout, PageLayout
from quantkit_kernels.forward.triton import cache, conversion, experts, gqa, index, linear, mla, tags
from quantkit_kernels.forward.triton.launch import Launch, recording
from quantkit_kernels.forward.weights import Experts, Fp8Weight, Int4Weight
from quantkit_kernels.search import METHODS

HIDDEN, INNER, HEADS, TABLE = 6144, 2048, 64, 64


def launches() -> list[Launch]:
    """One launch of each kernel and configuration, in a fixed order."""
    with recording() as found:
        for tokens in (1, 512):
            _linears(tokens)
            _experts(tokens)
        for kv_dtype in ("fp8", "bf16"):
            _caches(kv_dtype)
            _gqa(GqaLayout(64, 4, 128, kv_dtype))
            _mla(MlaLayout(64, kv_dtype))
            _index(IndexLayout(64, kv_dtype))
        _tags()
        _conversions()
    return list(_distinct(found))


def _distinct(found: list[Launch]) -> Iterator[Launch]:
    seen = set()
    for launch in found:
        key = (launch.kernel.__name__, *sorted(map(str, launch.constants.items())), str(launch.options))
        if key not in seen:
            seen.add(key)
            yield launch


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _int4(rows: int, columns: int, group: int) -> Int4Weight:
    return Int4Weight(_empty(rows, columns // 8, dtype=torch.int32), _empty(rows, columns // group))


def _fp8(rows: int, columns: int) -> Fp8Weight:
    scale = _empty(-(-rows // 128), -(-columns // 128), dtype=torch.float32)
    return Fp8Weight(_empty(rows, columns, dtype=torch.float8_e4m3fn), scale)


def _group(tokens: int) -> int:
    """Small groups with few tokens, large ones with many: compiling both with both would take twice as long."""
    return 32 if tokens == 1 else 128


def _linears(tokens: int) -> None:
    group = _group(tokens)
    linear.int4_linear(_empty(tokens, HIDDEN), _int4(INNER, HIDDEN, group), _empty(tokens, INNER))
    linear.fp8_linear(_empty(tokens, HIDDEN), _fp8(INNER, HIDDEN), _empty(tokens, INNER))


def _experts(tokens: int) -> None:
    """16 experts: eight choices of one token are few pairs for each, those of 512 are many."""
    x, out, weights = _empty(tokens, HIDDEN), _empty(tokens, HIDDEN), _empty(tokens, 8, dtype=torch.float32)
    ids = _empty(tokens, 8, dtype=torch.int32)
    group = _group(tokens)
    down, up = _int4(HIDDEN, INNER, group), _int4(INNER, HIDDEN, group)
    experts.moe_int4(x, ids, weights, Experts([up] * 16, [up] * 16, [down] * 16), out)
    wide, narrow = _fp8(INNER, HIDDEN), _fp8(HIDDEN, INNER)
    experts.moe_fp8(x, ids, weights, Experts([wide] * 16, [wide] * 16, [narrow] * 16), out)


def _pages(layout: PageLayout) -> tuple[Tensor, Tensor, Tensor]:
    """A pool of 256 pages, a table of four requests, their lengths."""
    table = _empty(4, TABLE, dtype=torch.int32)
    return _empty(256, layout.page_bytes, dtype=torch.uint8), table, _empty(4, dtype=torch.int32)


def _caches(kv_dtype: str) -> None:
    gqa_layout, mla_layout, index_layout = (
        GqaLayout(64, 4, 128, kv_dtype),
        MlaLayout(64, kv_dtype),
        IndexLayout(64),
    )
    slots, ids = _empty(16, dtype=torch.int64), _empty(3, dtype=torch.int64)
    pages, table, lengths = _pages(gqa_layout)
    cache.store_gqa(pages, gqa_layout, slots, _empty(16, 4, 128), _empty(16, 4, 128))
    cache.gather_gqa(pages, gqa_layout, table, lengths, 4096)
    cache.copy_pages(pages, ids, ids)
    cache.copy_pages(pages[:, 1:], ids, ids)
    cache.store_mla(_pages(mla_layout)[0], mla_layout, slots, _empty(16, 512), _empty(16, 64))
    cache.gather_mla(_pages(mla_layout)[0], mla_layout, table, lengths, 4096)
    cache.store_index_keys(_pages(index_layout)[0], index_layout, slots, _empty(16, 128))


def _gqa(layout: GqaLayout) -> None:
    pages, table, lengths = _pages(layout)
    starts, query = _empty(5, dtype=torch.int32), _empty(512, 64, 128)
    gqa.gqa_decode(query[:4], pages, layout, table, lengths, scale=0.1, out=_empty(4, 64, 128))
    fresh = _empty(512, 4, 128) if layout.is_fp8 else None
    gqa.gqa_prefill(
        query, pages, layout, table, starts, lengths, scale=0.1, fresh_key=fresh, fresh_value=fresh, out=query
    )


def _mla(layout: MlaLayout) -> None:
    """FP8 dense and sparse with all heads, dense with the 16 of one of four GPUs; BF16 dense."""
    pages, table, lengths = _pages(layout)
    starts, chosen = _empty(5, dtype=torch.int32), _empty(512, 2048, dtype=torch.int32)
    latent, rope = _empty(512, HEADS, 512), _empty(512, HEADS, 64)
    own: dict[str, Any] = {"fresh_latent": _empty(512, 512), "fresh_rope": _empty(512, 64)}
    none: dict[str, Any] = dict.fromkeys(own)

    def decode(heads: int, indices: Tensor | None) -> None:
        parts = latent[:4, :heads], rope[:4, :heads]
        mla.mla_decode(
            *parts, pages, layout, table, lengths, scale=0.1, indices=indices, out=_empty(4, heads, 512)
        )

    def prefill(heads: int, indices: Tensor | None, fresh: dict[str, Any]) -> None:
        parts = latent[:, :heads], rope[:, :heads]
        out = _empty(512, heads, 512)
        mla.mla_prefill(
            *parts, pages, layout, table, starts, lengths, scale=0.1, indices=indices, out=out, **fresh
        )

    if layout.is_fp8:
        decode(HEADS, None)
        decode(HEADS, chosen[:4])
        decode(16, None)
        prefill(HEADS, chosen, own)
        prefill(16, None, none)
    else:
        decode(HEADS, None)
        prefill(HEADS, None, own)


def _index(layout: IndexLayout) -> None:
    pages, table, lengths = _pages(layout)
    rows = _empty(4, dtype=torch.int32)
    weights = _empty(4, 32, dtype=torch.float32)
    scores = index.index_scores(_empty(4, 32, 128), weights, pages, layout, table, rows, lengths, 4096)
    index.index_topk(scores, lengths, 2048)


def _tags() -> None:
    table, numbers = _empty(64, 256, dtype=torch.int32), _empty(64, 256, dtype=torch.uint64)
    tags.check_page_tags(table, table, numbers, numbers[0], table[:, 0])


def _conversions() -> None:
    """In host memory: the backend copies its results back, whatever is in them while nothing runs."""
    backend = conversion.TritonBackend(torch.device("cpu"))
    codes, scales = np.zeros((128, 256), np.uint8), np.ones((1, 2), np.float32)
    for method in METHODS.values():
        backend.fp8_to_int4(codes, scales, (128, 128), 0, 32, method)
    backend.fp8_to_float32(codes, scales, (128, 128), 0)
    backend.fp8_to_bf16(codes, scales, (128, 128), 0)
    backend.int4_to_bf16(np.zeros((128, 32), np.int32), np.zeros((128, 8), np.uint16), 256, 32)
    weight = np.zeros((128, 256), np.float32)
    backend.float_to_int4(weight, 0, 128, METHODS["mse"], np.ones(256, np.float32))
    backend.float_to_int4(weight.astype(np.uint16), 0, 64, METHODS["mse"])
    backend.float_to_fp8(weight, 0, (128, 128))
    backend.bf16_to_float32(np.zeros(1024, np.uint16))
    backend.float32_to_bf16(np.zeros(1024, np.float32))
