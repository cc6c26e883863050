"""MLA decode over FP8 and BF16 pages at 4k context, and the other paged operations, with what bounds them.

    python bench/kernels/attention.py [FILE.json]

A latent of 656 bytes meets 2 * (576 + 512) operations of every head, so from a few heads on a CPU is bound by its
matrix rate and not by memory. The target is a share of the read bandwidth; beside it stands the share of torch's
BF16 matrix rate, measured in the same run. "In chunks" is the price of the same bits for any
batch: the 512-token chunks of a context and their merge, against one pass over it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from limits import best_of_each, matrix_rate, read_bandwidth
from torch import Tensor

from measure import Row, write_rows
from quantkit_kernels.forward.cache import store_mla
from quantkit_kernels.forward.gqa import gqa_decode, gqa_prefill
from quantkit_kernels.forward.index import index_scores, index_topk
from quantkit_kernels.forward.mla import mla_decode, mla_prefill
from quantkit_kernels.forward.pages import GqaLayout, IndexLayout, MlaLayout

CONTEXT, PAGE, REQUESTS = 4096, 64, 16  # 43 MB of FP8 latents, beyond the last-level cache
HEADS = (1, 8, 16, 64)


def pool(layout: Any, tokens: int) -> Tensor:
    """A pool with room for the tokens, finite numbers in it."""
    pages = layout.allocate(-(-tokens // PAGE))
    for part in layout.views(pages):
        if part is None:
            continue
        if part.dtype == torch.float8_e4m3fn:
            part.view(torch.uint8).copy_(torch.randint(0, 0x70, part.shape, dtype=torch.uint8))
        elif part.dtype == torch.float32:
            part.fill_(0.01)
        else:
            part.copy_(torch.randn(part.shape))
    return pages


def tables(requests: int, context: int = CONTEXT) -> tuple[Tensor, Tensor]:
    """Shuffled pages, all requests of the same length."""
    pages = torch.randperm(requests * context // PAGE).int().view(requests, -1)
    return pages, torch.full((requests,), context, dtype=torch.int32)


def mla(heads: int) -> list[Row]:
    """Decode at equal batch from FP8 and from BF16 pages."""
    table, lengths = tables(REQUESTS)
    latent, rope = torch.randn(REQUESTS, heads, 512).bfloat16(), torch.randn(REQUESTS, heads, 64).bfloat16()
    out = torch.empty_like(latent)
    layouts = {name: MlaLayout(PAGE, name) for name in ("fp8", "bf16")}
    pages = {name: pool(layout, REQUESTS * CONTEXT) for name, layout in layouts.items()}
    calls: dict[str, Callable[[], object]] = {
        name: lambda name=name: mla_decode(  # type: ignore[misc]
            latent, rope, pages[name], layouts[name], table, lengths, scale=0.07, out=out
        )
        for name in layouts
    }
    times = best_of_each(calls, 0.7)
    tokens = REQUESTS * CONTEXT
    read = tokens * layouts["fp8"].record_bytes / times["fp8"]
    work = tokens * heads * 2 * (576 + 512) / times["fp8"]
    of_read, of_matrix = read / read_bandwidth(), work / matrix_rate(512, 4096, 4096, 0.5)
    name = f"mla_decode, FP8 pages, {REQUESTS} x {CONTEXT} tokens, {heads} heads"
    share = f"{of_read:.0%} of read bandwidth, {of_matrix:.0%} of the BF16 matrix rate"
    return [
        Row(
            name,
            times["fp8"] * 1e3,
            "ms",
            share,
            read / 1e9,
            ">= 60 % of read bandwidth",
            of_read >= 0.6,
        ),
        Row(
            f"  FP8 against BF16 pages, {heads} heads",
            times["fp8"] / times["bf16"],
            "times",
            "BF16 pages, ms",
            times["bf16"] * 1e3,
            "<= 1.10",
            times["fp8"] <= 1.1 * times["bf16"],
        ),
    ]


def chunks(heads: int = 64) -> list[Row]:
    """What the fixed chunks of a decode cost: a prefill of one query does the same in one pass."""
    layout = MlaLayout(PAGE)
    pages, (table, lengths) = pool(layout, REQUESTS * CONTEXT), tables(REQUESTS)
    latent, rope = torch.randn(REQUESTS, heads, 512).bfloat16(), torch.randn(REQUESTS, heads, 64).bfloat16()
    starts = torch.arange(REQUESTS + 1, dtype=torch.int32)
    times = best_of_each(
        {
            "chunks": lambda: mla_decode(latent, rope, pages, layout, table, lengths, scale=0.07),
            "one pass": lambda: mla_prefill(latent, rope, pages, layout, table, starts, lengths, scale=0.07),
        },
        0.7,
    )
    price = times["chunks"] / times["one pass"] - 1
    return [
        Row(
            f"mla_decode in chunks, {heads} heads: price",
            price * 100,
            "%",
            "one pass, ms",
            times["one pass"] * 1e3,
        )
    ]


def gqa() -> list[Row]:
    """Decode and prefill of grouped-query attention, 32 heads over 4 of 128 (Qwen3-30B)."""
    rows = []
    table, lengths = tables(REQUESTS)
    query = torch.randn(REQUESTS, 32, 128).bfloat16()
    layouts = {name: GqaLayout(PAGE, 4, 128, name) for name in ("fp8", "bf16")}
    pages = {name: pool(layout, REQUESTS * CONTEXT) for name, layout in layouts.items()}
    calls: dict[str, Callable[[], object]] = {
        name: lambda name=name: gqa_decode(  # type: ignore[misc]
            query, pages[name], layouts[name], table, lengths, scale=0.09
        )
        for name in layouts
    }
    times = best_of_each(calls, 0.5)
    read = pages["fp8"].nbytes / times["fp8"]
    name = f"gqa_decode, FP8 pages, {REQUESTS} x {CONTEXT} tokens, 32 / 4 heads"
    rows.append(Row(name, times["fp8"] * 1e3, "ms", f"{read / read_bandwidth():.0%} of read, GB/s", read / 1e9))
    ratio = times["fp8"] / times["bf16"]
    rows.append(Row("  FP8 against BF16 pages", ratio, "times", "BF16 pages, ms", times["bf16"] * 1e3))
    queries = 512
    long_query = torch.randn(queries, 32, 128).bfloat16()
    starts = torch.tensor([0, queries], dtype=torch.int32)
    call = {
        "prefill": lambda: gqa_prefill(
            long_query, pages["fp8"], layouts["fp8"], table[:1], starts, lengths[:1], scale=0.09
        )
    }
    seconds = best_of_each(call, 0.5)["prefill"]
    pairs = queries * (CONTEXT - queries) + queries * (queries + 1) // 2
    work, peak = pairs * 32 * 4 * 128 / seconds, matrix_rate(512, 4096, 4096, 0.5)
    name = f"gqa_prefill, {queries} queries at {CONTEXT} tokens, 32 / 4 heads"
    rows.append(Row(name, seconds * 1e3, "ms", f"{work / peak:.0%} of the BF16 matrix rate, GFLOP/s", work / 1e9))
    return rows


def sparse(context: int = 32768, heads: int = 64, chosen: int = 2048) -> list[Row]:
    """One step of a DSA layer of GLM-5.2 at a long context: scores, top-k, attention over the chosen."""
    table, lengths = tables(1, context)
    index, layout = IndexLayout(PAGE), MlaLayout(PAGE)
    keys, pages = pool(index, context), pool(layout, context)
    row = torch.zeros(1, dtype=torch.int32)
    query, weights = torch.randn(1, 32, 128).bfloat16(), torch.randn(1, 32)
    latent, rope = torch.randn(1, heads, 512).bfloat16(), torch.randn(1, heads, 64).bfloat16()
    scores = index_scores(query, weights, keys, index, table, row, lengths)
    indices = index_topk(scores, lengths, chosen)
    times = best_of_each(
        {
            "index_scores": lambda: index_scores(query, weights, keys, index, table, row, lengths),
            "index_topk": lambda: index_topk(scores, lengths, chosen),
            "mla_decode, sparse": lambda: mla_decode(
                latent, rope, pages, layout, table, lengths, scale=0.07, indices=indices
            ),
            "mla_decode, dense": lambda: mla_decode(latent, rope, pages, layout, table, lengths, scale=0.07),
        },
        0.4,
    )
    torch_topk = best_of_each({"torch": lambda: scores.topk(chosen, dim=1).indices.sort(dim=1)}, 0.3)["torch"]
    peers = {"index_topk": ("torch topk and sort, ms", torch_topk * 1e3)}
    return [
        Row(f"{name}, one token at {context}", seconds * 1e3, "ms", *peers.get(name, (None, None)))
        for name, seconds in times.items()
    ]


def storing(tokens: int = 4096) -> list[Row]:
    layout = MlaLayout(PAGE)
    pages, slots = layout.allocate(tokens // PAGE), torch.randperm(tokens)
    latent, rope = torch.randn(tokens, 512).bfloat16(), torch.randn(tokens, 64).bfloat16()
    seconds = best_of_each({"store": lambda: store_mla(pages, layout, slots, latent, rope)}, 0.3)["store"]
    return [Row(f"store_mla, {tokens} tokens", tokens * 576 / seconds / 1e9, "Gelem/s")]


def rows() -> list[Row]:
    torch.manual_seed(0)
    return [*(row for heads in HEADS for row in mla(heads)), *chunks(), *gqa(), *sparse(), *storing()]


if __name__ == "__main__":
    write_rows(rows(), sys.argv[1] if len(sys.argv) > 1 else None)
