"""The cases of the roofline table, at the shapes of GLM-5.2, each taking turns among copies of its data that are
together well beyond the last-level cache.

Legend: hidden 6144, experts of 2048; GQA with 64 query and 4 key-value heads of 128, MLA with 64 heads.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantkit_kernels.forward.pages import GqaLayout, IndexLayout, MlaLayout, PageLayout
from quantkit_kernels.forward.triton import experts, gqa, index, linear, mla, tags
from quantkit_kernels.forward.triton.kernels import conversion as conversion_kernels
from quantkit_kernels.forward.triton.launch import ceil_div, launch
from quantkit_kernels.forward.weights import Experts, Fp8Weight, Int4Weight
from quantkit_kernels.search import METHODS

from .gpu_roofline import Machine, Row, Run

Context = tuple[Tensor, Tensor, Tensor]


def rows(machine: Machine, deadline: float) -> Iterator[Row]:
    """All cases, until ``time.perf_counter()`` reaches the deadline."""
    for group in (_linears, _experts, _gqa_decode, _mla_decode, _prefill, _index, _conversions, _tags):
        for row in group(machine):
            yield row
            if time.perf_counter() > deadline:
                return


def _int4(machine: Machine, outputs: int, columns: int, group: int) -> Int4Weight:
    scale = (torch.rand(outputs, columns // group, device=machine.device) * 0.01).bfloat16()
    return Int4Weight(machine.integers(-(2**31), 2**31 - 1, outputs, columns // 8), scale)


def _fp8(machine: Machine, outputs: int, columns: int) -> Fp8Weight:
    codes = machine.integers(0, 0x7F, outputs, columns).to(torch.uint8).view(torch.float8_e4m3fn)
    return Fp8Weight(codes, torch.rand(-(-outputs // 128), -(-columns // 128), device=machine.device) * 1e-3)


def _bytes(weight: Any) -> int:
    parts = (weight.packed, weight.scale) if isinstance(weight, Int4Weight) else (weight.codes, weight.scale)
    return sum(part.numel() * part.element_size() for part in parts)


def _linears(machine: Machine) -> Iterator[Row]:
    outputs, columns = machine.size(16384, 64), machine.size(6144, 256)
    kinds: tuple[tuple[str, Any, Any], ...] = (
        ("int4_linear g32", partial(_int4, machine, outputs, columns, 32), linear.int4_linear),
        ("int4_linear g128", partial(_int4, machine, outputs, columns, 128), linear.int4_linear),
        ("fp8_linear", partial(_fp8, machine, outputs, columns), linear.fp8_linear),
    )
    for name, make, function in kinds:
        weights = [make() for _ in range(machine.size(6, 1))]
        for tokens in (1, 17) if machine.is_tiny else (1, 8, 64, 4096):
            x, out = machine.normal(tokens, columns), machine.normal(tokens, outputs)
            runs: list[Run] = [partial(function, x, weight, out) for weight in weights]
            size = _bytes(weights[0]) + 2 * tokens * (columns + outputs)
            title = f"{name}, {tokens} rows of {outputs} x {columns}"
            yield machine.row(title, runs, size, 2 * tokens * outputs * columns)


def _experts(machine: Machine) -> Iterator[Row]:
    hidden, inner = machine.size(6144, 128), machine.size(2048, 128)
    count, choices = machine.size(64, 2), machine.size(8, 1)
    kinds: tuple[tuple[str, Any, Any], ...] = (
        ("moe_int4 g32", partial(_int4, machine, group=32), experts.moe_int4),
        ("moe_int4 g128", partial(_int4, machine, group=128), experts.moe_int4),
        ("moe_fp8", partial(_fp8, machine), experts.moe_fp8),
    )
    for name, make, function in kinds:
        sizes = ((inner, hidden), (inner, hidden), (hidden, inner))
        layer: Any = Experts(*([make(*size) for _ in range(count)] for size in sizes))
        each = sum(_bytes(part[0]) for part in (layer.gate, layer.up, layer.down))
        for tokens in (1, machine.size(16, 2), machine.size(4096, 3)):
            x, out = machine.normal(tokens, hidden) * 0.1, machine.normal(tokens, hidden)
            weights = torch.rand(tokens, choices, device=machine.device)
            draws = [torch.rand(tokens, count, device=machine.device) for _ in range(4)]
            picks = [draw.argsort(1)[:, :choices].int() for draw in draws]
            runs: list[Run] = [partial(function, x, ids, weights, layer, out) for ids in picks]
            used = sum(len(set(ids.flatten().tolist())) for ids in picks) / len(picks)
            flops = 2 * 3 * tokens * choices * hidden * inner
            yield machine.row(f"{name}, {tokens} tokens, top {choices} of {count}", runs, used * each, flops)


def _context(machine: Machine, layout: PageLayout, requests: int, length: int) -> Context:
    """A pool of bytes that no format finds special, a table in random order, lengths."""
    need = -(-length // layout.page_size)
    pool = machine.integers(0, 48, requests * need, layout.page_bytes).to(torch.uint8)
    table = torch.randperm(requests * need, device=machine.device).int().view(requests, need)
    return pool, table, torch.full((requests,), length, dtype=torch.int32, device=machine.device)


def _paged(run: Any, layout: PageLayout, pool: Tensor, table: Tensor, lengths: Tensor) -> None:
    run(pages=pool, layout=layout, block_table=table, lengths=lengths)


def _gqa_decode(machine: Machine) -> Iterator[Row]:
    requests, length, heads = machine.size(64, 1), machine.size(4096, 9), machine.size(64, 2)
    for kv_dtype in ("fp8", "bf16"):
        layout = GqaLayout(machine.size(64, 4), machine.size(4, 1), machine.size(128, 16), kv_dtype)
        pools = [_context(machine, layout, requests, length) for _ in range(machine.size(3, 1))]
        query = machine.normal(requests, heads, layout.head_dim)
        run = partial(gqa.gqa_decode, query, scale=0.1, out=torch.empty_like(query))
        read = requests * length * layout.page_bytes / layout.page_size
        flops = 4 * requests * heads * length * layout.head_dim
        runs: list[Run] = [partial(_paged, run, layout, *parts) for parts in pools]
        yield machine.row(f"gqa_decode {kv_dtype}, {requests} x {length}", runs, read, flops)


def _mla_decode(machine: Machine) -> Iterator[Row]:
    requests, length, heads = machine.size(64, 1), machine.size(4096, 9), machine.size(64, 2)
    chosen = machine.size(2048, 3)
    for kv_dtype in ("fp8", "bf16"):
        layout = MlaLayout(machine.size(64, 4), kv_dtype)
        pools = [_context(machine, layout, requests, length) for _ in range(machine.size(3, 1))]
        latent, rope = machine.normal(requests, heads, 512), machine.normal(requests, heads, 64)
        some = torch.rand(requests, length, device=machine.device).argsort(1)[:, :chosen].int()
        for name, indices, seen in (("", None, length), (f" sparse {chosen}", some, chosen)):
            run = partial(mla.mla_decode, latent, rope, scale=0.1, indices=indices, out=torch.empty_like(latent))
            read = requests * seen * layout.record_bytes
            flops = 2 * requests * heads * seen * (576 + 512)
            runs: list[Run] = [partial(_paged, run, layout, *parts) for parts in pools]
            yield machine.row(f"mla_decode {kv_dtype}{name}, {requests} x {length}", runs, read, flops)


def _prefill(machine: Machine) -> Iterator[Row]:
    tokens, heads, chosen = machine.size(4096, 5), machine.size(64, 2), machine.size(2048, 3)
    starts = torch.tensor([0, tokens], dtype=torch.int32, device=machine.device)
    layout = GqaLayout(machine.size(64, 4), machine.size(4, 1), machine.size(128, 16))
    query = machine.normal(tokens, heads, layout.head_dim)
    key = machine.normal(tokens, layout.num_kv_heads, layout.head_dim)
    run = partial(
        gqa.gqa_prefill, query, cu_queries=starts, scale=0.1, fresh_key=key, fresh_value=key,
        out=torch.empty_like(query),
    )  # fmt: skip
    fresh: Run = partial(_paged, run, layout, *_context(machine, layout, 1, tokens))
    pairs = tokens * (tokens + 1) // 2
    yield machine.row(f"gqa_prefill fresh, {tokens}", [fresh], 0, 4 * pairs * heads * layout.head_dim)
    latents = MlaLayout(machine.size(64, 4))
    latent, rope = machine.normal(tokens, heads, 512), machine.normal(tokens, heads, 64)
    order = torch.rand(tokens, tokens, device=machine.device).tril().argsort(1, descending=True)[:, :chosen].int()
    seen = torch.arange(tokens, device=machine.device)[:, None]
    some = order.masked_fill(order > seen, -1)
    run_sparse = partial(
        mla.mla_prefill, latent, rope, cu_queries=starts, scale=0.1, fresh_latent=None, fresh_rope=None,
        indices=some, out=torch.empty_like(latent),
    )  # fmt: skip
    sparse: Run = partial(_paged, run_sparse, latents, *_context(machine, latents, 1, tokens))
    flops = 2 * int((some >= 0).sum()) * heads * (576 + 512)
    yield machine.row(f"mla_prefill sparse {chosen}, {tokens}", [sparse], 0, flops)


def _index(machine: Machine) -> Iterator[Row]:
    tokens, length, heads = machine.size(64, 2), machine.size(32768, 20), machine.size(32, 3)
    layout = IndexLayout(machine.size(64, 4))
    pool, table, lengths = _context(machine, layout, tokens, length)
    query, weights = machine.normal(tokens, heads, 128), torch.rand(tokens, heads, device=machine.device)
    each = torch.arange(tokens, device=machine.device).int()
    run: Run = partial(index.index_scores, query, weights, pool, layout, table, each, lengths, length)
    flops = 2 * tokens * heads * length * 128
    yield machine.row(f"index_scores, {tokens} x {length}", [run], tokens * length * 132, flops)
    scores, k = torch.randn(tokens, length, device=machine.device), machine.size(2048, 3)
    best: Run = partial(index.index_topk, scores, lengths, k)
    yield machine.row(f"index_topk {k}, {tokens} x {length}", [best], scores.numel() * 4, 0)


def _conversions(machine: Machine) -> Iterator[Row]:
    """On the device alone: the backend's copies from and to numpy are left out."""
    outputs, columns, group = machine.size(16384, 4), machine.size(6144, 128), 32
    weight = _fp8(machine, outputs, columns)
    codes = weight.codes.view(torch.uint8)
    words = torch.empty(outputs, columns // 8, dtype=torch.int32, device=machine.device)
    scale = torch.empty(outputs, columns // group, dtype=torch.uint16, device=machine.device)
    error, energy = (torch.empty(scale.shape, device=machine.device) for _ in range(2))
    bad = torch.full((1,), 2**63 - 1, device=machine.device)
    for name, method in METHODS.items():
        factors = torch.from_numpy(method.factors.copy()).to(machine.device)
        run: Run = partial(
            launch, conversion_kernels.to_int4_kernel, (ceil_div(scale.numel(), 32),), codes, columns,
            weight.scale, weight.scale.shape[1], factors, factors, words, scale, error, energy, bad, outputs,
            columns, 0, 128, 128, factors.numel(), KIND="fp8", UNBIASED=method.is_unbiased, WEIGHTED=False,
            GROUP=group, BLOCK=32,
        )  # fmt: skip
        yield machine.row(f"fp8_to_int4 {name} g{group}, {outputs} x {columns}", [run], _bytes(weight), 0)


def _tags(machine: Machine) -> Iterator[Row]:
    requests, entries = machine.size(64, 2), machine.size(256, 3)
    table = machine.integers(0, 1000, requests, entries)
    pool = torch.randint(0, 2**62, (1000,), device=machine.device)
    wanted = pool[table.long()].view(torch.uint64)
    counts = torch.full((requests,), entries, dtype=torch.int32, device=machine.device)
    run: Run = partial(tags.check_page_tags, table, table, wanted, pool.view(torch.uint64), counts)
    yield machine.row(f"check_page_tags, {requests} x {entries}", [run], requests * entries * 24, 0)
