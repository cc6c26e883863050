"""Every Triton operation against its torch twin: the kernels on a device, the twins in host memory.

Conversions, caches, top-k and tags must have the twin's bits; sums are held to the bounds that the public modules
state. Besides, a row alone must have the bits that it has in a batch.

Legend: as in quantkit_kernels.forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit_kernels.forward.pages import GqaLayout, IndexLayout, MlaLayout, PageLayout
from quantkit_kernels.forward.triton import conversion
from quantkit_kernels.forward.weights import Experts, Fp8Weight, Int4Weight
from quantkit_kernels.search import METHODS
from quantkit_kernels.torch_twin import TorchTwin


def _modules(area: str) -> tuple[Any, Any]:
    """The Triton implementation of an area and its twin."""
    mine, twin = (import_module(f"quantkit_kernels.forward.{folder}.{area}") for folder in ("triton", "twin"))
    return mine, twin


linear, twin_linear = _modules("linear")
experts, twin_experts = _modules("experts")
cache, twin_cache = _modules("cache")
gqa, twin_gqa = _modules("gqa")
mla, twin_mla = _modules("mla")
index, twin_index = _modules("index")
tags, twin_tags = _modules("tags")


@dataclass(frozen=True)
class Check:
    """One comparison: the largest error over its limit (0 and 0 for bits), or what went wrong."""

    name: str
    ok: bool
    error: float
    limit: float
    seconds: float
    problem: str | None = None


@dataclass(frozen=True)
class Case:
    """What to run: the device, whether sizes are tiny (for the interpreter), and a source of numbers."""

    device: torch.device
    is_tiny: bool
    generator: torch.Generator

    def size(self, full: int, tiny: int) -> int:
        return tiny if self.is_tiny else full

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).bfloat16()

    def to(self, *values: Tensor) -> list[Tensor]:
        return [value.to(self.device) for value in values]


Outcome = tuple[float, float]  # error, limit
Run = Callable[[Case], Iterator[tuple[str, Outcome]]]


def run_checks(device: torch.device, *, is_tiny: bool) -> Iterator[Check]:
    """All checks; one that raises is a failed check, and the others go on."""
    for group in GROUPS:
        case = Case(device, is_tiny, torch.Generator().manual_seed(20))
        start = time.perf_counter()
        try:
            for name, (error, limit) in group(case):
                now = time.perf_counter()
                yield Check(name, error <= limit, error, limit, now - start)
                start = now
        except Exception as problem:  # a kernel that fails must not hide what the others do
            name = group.__name__.strip("_")
            yield Check(name, False, float("inf"), 0.0, time.perf_counter() - start, f"{problem!r:.2000}")


def _same(found: Tensor, wanted: Tensor) -> Outcome:
    """How many elements differ; any NaN equals any other."""
    found = found.cpu()
    if found.is_floating_point():
        equal = (found == wanted) | (found.isnan() & wanted.isnan())
    else:
        equal = found == wanted
    return float((~equal).sum()), 0.0


def _near(found: Tensor, wanted: Tensor, unit: Tensor | float, limit: float) -> Outcome:
    """The largest error in ``unit``; not finite counts as infinite."""
    error = ((found.cpu().double() - wanted.double()).abs() / unit).max() if found.numel() else torch.zeros(())
    return float(error) if error.isfinite() else float("inf"), limit


def move(weight: Any, device: torch.device) -> Any:
    if isinstance(weight, Int4Weight):
        return Int4Weight(weight.packed.to(device), weight.scale.to(device))
    return Fp8Weight(weight.codes.to(device), weight.scale.to(device), weight.block)


def int4(case: Case, rows: int, columns: int, group: int) -> Int4Weight:
    packed = torch.randint(-(2**31), 2**31, (rows, columns // 8), generator=case.generator).int()
    return Int4Weight(packed, (torch.rand(rows, columns // group, generator=case.generator) * 0.01).bfloat16())


def fp8(case: Case, rows: int, columns: int, block: tuple[int, int] = (128, 128)) -> Fp8Weight:
    codes = torch.randint(0, 256, (rows, columns), generator=case.generator).to(torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x11
    scale = torch.rand(-(-rows // block[0]), -(-columns // block[1]), generator=case.generator) * 1e-3
    return Fp8Weight(codes.view(torch.float8_e4m3fn), scale, block)


def _linears(case: Case) -> Iterator[tuple[str, Outcome]]:
    outputs, columns = case.size(579, 33), case.size(4224, 256)
    weights: list[tuple[str, Any]] = [
        (f"int4_linear g{g}", int4(case, outputs, columns, g)) for g in (32, 64, 128)
    ]
    weights += [("fp8_linear", fp8(case, outputs, columns)), ("fp8_linear 64x96", fp8(case, 67, 300, (64, 96)))]
    for name, weight in weights:
        moved = move(weight, case.device)
        function: Any = linear.int4_linear if isinstance(weight, Int4Weight) else linear.fp8_linear
        exact = twin_linear.dequantize(weight, slice(0, weight.out_features)).double()
        most = case.size(300, 20)
        x = case.normal(most, weight.in_features)
        (there,) = case.to(x)
        whole = torch.empty(most, weight.out_features, dtype=torch.bfloat16, device=case.device)
        function(there, moved, whole)
        wanted, size = x.double() @ exact.T, x.double().abs() @ exact.abs().T
        limit = (weight.in_features / 128 + 16) * 2.0**-24 * size + 2.0**-8 * wanted.abs()
        yield name, _near(whole, wanted, limit.clamp(min=1e-30), 1.0)
        for tokens in (1, 7, 33):
            if tokens < most:
                few = torch.empty_like(whole[:tokens])
                function(there[:tokens], moved, few)
                yield f"{name}, {tokens} of {most} rows: same bits", _same(few, whole[:tokens].cpu())


def _experts(case: Case) -> Iterator[tuple[str, Outcome]]:
    hidden, inner, count = case.size(640, 128), case.size(256, 128), case.size(9, 2)
    for kind in ("int4", "fp8"):

        def one(rows: int, columns: int, kind: str = kind) -> Any:
            return int4(case, rows, columns, 32) if kind == "int4" else fp8(case, rows, columns)

        parts = [
            [one(*size) for _ in range(count)] for size in ((inner, hidden), (inner, hidden), (hidden, inner))
        ]
        layer: Any = Experts(*parts)
        moved: Any = Experts(*([move(w, case.device) for w in part] for part in parts))
        function: Any = experts.moe_int4 if kind == "int4" else experts.moe_fp8
        twin: Any = twin_experts.moe_int4 if kind == "int4" else twin_experts.moe_fp8
        for tokens in (1, case.size(350, 5)):
            x, weights = case.normal(tokens, hidden) * 0.2, torch.rand(tokens, 3, generator=case.generator)
            ids = torch.randint(-1, count, (tokens, 3), generator=case.generator, dtype=torch.int32)
            ids[0] = torch.arange(3) % count
            wanted, found = torch.empty_like(x), torch.empty_like(x, device=case.device)
            twin(x, ids, weights, layer, wanted)
            function(*case.to(x, ids, weights), moved, found)
            yield f"moe_{kind}, {tokens} tokens", _near(found, wanted, wanted.double().abs().max(), 2.0**-6)
        alone = torch.empty_like(found[:1])
        function(*case.to(x[:1], ids[:1], weights[:1]), moved, alone)
        yield f"moe_{kind}, a token alone: same bits", _same(alone, found[:1].cpu())


def fill(case: Case, layout: PageLayout, pages: int) -> Tensor:
    """Random finite content."""
    pool = layout.allocate(pages)
    pool.copy_(torch.randint(0, 256, pool.shape, generator=case.generator, dtype=torch.uint8))
    for part in layout.views(pool):  # type: ignore[attr-defined]
        if part is not None and part.dtype == torch.float8_e4m3fn:
            raw = part.view(torch.uint8)
            raw[(raw & 0x7F) == 0x7F] = 0x11
        elif part is not None and part.dtype == torch.float32:
            part.copy_(torch.rand(part.shape, generator=case.generator) * 0.01 + 0.001)
        elif part is not None:
            part.copy_(torch.randn(part.shape, generator=case.generator).bfloat16())
    return pool


def context(case: Case, layout: PageLayout, lengths: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """A pool, a table of pages in random order, the lengths."""
    need = [-(-n // layout.page_size) for n in lengths]
    order = torch.randperm(sum(need) + 1, generator=case.generator).int()
    table = torch.full((len(lengths), max(need) + 1), -1, dtype=torch.int32)
    for row, count in enumerate(need):
        first = sum(need[:row])
        table[row, :count] = order[first : first + count]
    return fill(case, layout, len(order)), table, torch.tensor(lengths, dtype=torch.int32)


def _caches(case: Case) -> Iterator[tuple[str, Outcome]]:
    rows = case.normal(6, 600) * torch.logspace(-30, 20, 6)[:, None].bfloat16()
    rows[2, :300], rows[3, 5], rows[4, 7] = 0, float("nan"), float("-inf")
    slots, source, target = torch.tensor([4, -1, 0, 17, 9, 2]), torch.tensor([1, 5]), torch.tensor([2, 4])
    table, lengths = torch.tensor([[1, 5], [3, 0]], dtype=torch.int32), torch.tensor([4, 6], dtype=torch.int32)
    stores: tuple[tuple[str, Any, tuple[Tensor, ...]], ...] = (
        ("gqa", GqaLayout, (rows[:, :26].reshape(6, 2, 13), rows[:, 26:52].reshape(6, 2, 13))),
        ("mla", MlaLayout, (rows[:, 8:520], rows[:, 520:584])),
        ("index_keys", IndexLayout, (rows[:, 3:131],)),
    )
    for name, kind, values in stores:
        for kv_dtype in ("fp8", "bf16"):
            layout = kind(3, 2, 13, kv_dtype) if kind is GqaLayout else kind(3, kv_dtype)
            pools = {}
            for module, device in ((twin_cache, torch.device("cpu")), (cache, case.device)):
                pool = layout.allocate(6, device)
                moved = [value.to(device) for value in values]
                getattr(module, f"store_{name}")(pool, layout, slots.to(device), *moved)
                module.copy_pages(pool, source.to(device), target.to(device))
                found = getattr(module, f"gather_{name}")(pool, layout, table.to(device), lengths.to(device), 6)
                pools[device] = [pool, *(found if isinstance(found, tuple) else (found,))]
            pairs = zip(pools[case.device], pools[torch.device("cpu")], strict=True)
            wrong = sum(_same(mine, wanted)[0] for mine, wanted in pairs)
            yield f"store_{name}, copy_pages, gather_{name} {kv_dtype}", (wrong, 0.0)


def _gqa(case: Case) -> Iterator[tuple[str, Outcome]]:
    chunks, lengths = [1, case.size(200, 9), 0, case.size(33, 3)], [1, case.size(1400, 40), 5, case.size(700, 20)]
    starts = torch.tensor(np.cumsum([0, *chunks]), dtype=torch.int32)
    for kv_dtype, dim in (("fp8", 128), ("bf16", 67)):
        layout = GqaLayout(16, 2, dim, kv_dtype)
        parts = context(case, layout, lengths)
        there = case.to(*parts)
        most = max(part.float().abs().max() for part in twin_cache.gather_gqa(*_args(parts, layout), max(lengths)))
        query = case.normal(4, 8, dim)
        wanted, found = torch.empty_like(query), torch.empty_like(query, device=case.device)
        twin_gqa.gqa_decode(query, *_args(parts, layout), scale=dim**-0.5, out=wanted)
        gqa.gqa_decode(*case.to(query), *_args(there, layout), scale=dim**-0.5, out=found)
        yield f"gqa_decode {kv_dtype}", _near(found, wanted, most, 2.0**-7)
        alone = torch.empty_like(found[1:2])
        pool, table, length = there
        one = (pool, layout, table[1:2], length[1:2])
        gqa.gqa_decode(query[1:2].to(case.device), *one, scale=dim**-0.5, out=alone)
        yield f"gqa_decode {kv_dtype}, a row alone: same bits", _same(alone, found[1:2].cpu())
        tokens = sum(chunks)
        queries, key, value = case.normal(tokens, 8, dim), case.normal(tokens, 2, dim), case.normal(tokens, 2, dim)
        for fresh in ((None, None), (key, value)):
            wanted, found = torch.empty_like(queries), torch.empty_like(queries, device=case.device)
            own = {"fresh_key": fresh[0], "fresh_value": fresh[1]}
            moved = {name: None if part is None else part.to(case.device) for name, part in own.items()}
            args, away = (parts[1], starts, parts[2]), case.to(parts[1], starts, parts[2])
            twin_gqa.gqa_prefill(queries, parts[0], layout, *args, scale=0.1, out=wanted, **own)
            gqa.gqa_prefill(*case.to(queries), there[0], layout, *away, scale=0.1, out=found, **moved)
            unit = max(float(most), 6.0)
            name = f"gqa_prefill {kv_dtype}{' fresh' if fresh[0] is not None else ''}"
            yield name, _near(found, wanted, unit, 2.0**-7)


def _args(parts: Any, layout: PageLayout) -> tuple[Tensor, Any, Tensor, Tensor]:
    return parts[0], layout, parts[1], parts[2]


def _mla(case: Case) -> Iterator[tuple[str, Outcome]]:
    heads, longest = case.size(64, 3), case.size(1400, 40)
    chunks, lengths = [1, case.size(20, 2), 0], [1, longest, 5]
    starts = torch.tensor(np.cumsum([0, *chunks]), dtype=torch.int32)
    for kv_dtype in ("fp8", "bf16"):
        layout = MlaLayout(case.size(64, 5), kv_dtype)
        parts = context(case, layout, lengths)
        there = case.to(*parts)
        unit = float(twin_cache.gather_mla(*_args(parts, layout), longest)[0].float().abs().max())
        latent, rope = case.normal(3, heads, 512), case.normal(3, heads, 64)
        chosen = torch.full((3, case.size(600, 40)), -1, dtype=torch.int32)
        chosen[1, : longest // 3] = torch.randperm(longest, generator=case.generator)[: longest // 3].int()
        for indices in (None, chosen):
            wanted, found = torch.empty_like(latent), torch.empty_like(latent, device=case.device)
            sparse = None if indices is None else indices.to(case.device)
            twin_mla.mla_decode(latent, rope, *_args(parts, layout), scale=0.04, indices=indices, out=wanted)
            mla.mla_decode(*case.to(latent, rope), *_args(there, layout), scale=0.04, indices=sparse, out=found)
            yield (
                f"mla_decode {kv_dtype}{'' if indices is None else ' sparse'}",
                _near(found, wanted, unit, 2.0**-7),
            )
        tokens = sum(chunks)
        latent, rope = case.normal(tokens, heads, 512), case.normal(tokens, heads, 64)
        own = {"fresh_latent": case.normal(tokens, 512), "fresh_rope": case.normal(tokens, 64)}
        moved = {name: part.to(case.device) for name, part in own.items()}
        wanted, found = torch.empty_like(latent), torch.empty_like(latent, device=case.device)
        args, away = (parts[1], starts, parts[2]), case.to(parts[1], starts, parts[2])
        twin_mla.mla_prefill(latent, rope, parts[0], layout, *args, scale=0.04, indices=None, out=wanted, **own)
        mla.mla_prefill(
            *case.to(latent, rope), there[0], layout, *away, scale=0.04, indices=None, out=found, **moved
        )
        yield f"mla_prefill {kv_dtype} fresh", _near(found, wanted, max(unit, 6.0), 2.0**-7)


def _index(case: Case) -> Iterator[tuple[str, Outcome]]:
    longest = case.size(3000, 150)
    rows, visible = torch.tensor([1, 0, 1], dtype=torch.int32), torch.tensor([longest, 0, 33], dtype=torch.int32)
    for kv_dtype in ("fp8", "bf16"):
        layout = IndexLayout(case.size(64, 7), kv_dtype)
        pool, table, _ = context(case, layout, [9, longest])
        query, weights = case.normal(3, 32, 128), case.normal(3, 32).float()
        args = (query, weights, pool)
        wanted = twin_index.index_scores(*args, layout, table, rows, visible, longest)
        found = index.index_scores(*case.to(*args), layout, *case.to(table, rows, visible), longest)
        seen = wanted > -torch.inf
        hidden = float((found.cpu()[~seen] != -torch.inf).sum())
        keys = twin_cache.gather_index_keys(pool, layout, table, torch.tensor([9, longest]), longest)
        unit = float((weights.abs() * query.float().norm(dim=-1)).sum(1).max() * keys.float().norm(dim=-1).max())
        error, limit = _near(found.cpu()[seen], wanted[seen], unit, 2.0**-17)
        yield f"index_scores {kv_dtype}", (error if not hidden else float("inf"), limit)
    scores = torch.randint(-9, 9, (5, longest), generator=case.generator) / 4.0
    scores[1, 3], scores[2, ::3], scores[3, 5] = float("nan"), -0.0, float("-inf")
    lengths = torch.tensor([longest, longest, 33, 7, 0], dtype=torch.int32)
    for k in (1, 64, case.size(2048, 100)):
        found = index.index_topk(*case.to(scores, lengths), k)
        yield f"index_topk {k}", _same(found, twin_index.index_topk(scores, lengths, k))


def _tags(case: Case) -> Iterator[tuple[str, Outcome]]:
    table = torch.randint(0, 500, (64, 256), generator=case.generator, dtype=torch.int32)
    pool = torch.randint(-(2**63), 2**63 - 1, (500,), generator=case.generator)
    wanted, counts = pool[table.long()], torch.randint(0, 257, (64,), generator=case.generator, dtype=torch.int32)
    pages = table.clone()
    pages[::3, 9] ^= 1
    wanted[1::3, 4] ^= 1
    table[2::9, 0], counts[5] = 500, -1
    parts = (table, pages, wanted.view(torch.uint64), pool.view(torch.uint64), counts)
    found = tags.check_page_tags(*case.to(*parts))
    yield "check_page_tags", _same(found, twin_tags.check_page_tags(*parts))


def _conversions(case: Case) -> Iterator[tuple[str, Outcome]]:
    rng = np.random.default_rng(5)
    mine, twin = conversion.TritonBackend(), TorchTwin()
    rows = case.size(700, 3)
    codes = rng.integers(0, 256, (rows, 384), dtype=np.uint8)
    codes[codes & 0x7F == 0x7F] = 0x7E
    scales = (rng.random((-(-rows // 128), 3), dtype=np.float32) + 0.5) * np.float32(2e-4)
    weight = (rng.standard_normal((rows, 384)) * 10.0 ** rng.uniform(-6, 2, 384)).astype(np.float32)
    importance = rng.random(384, dtype=np.float32)
    block = (128, 128)
    runs: dict[str, Callable[[Any], Any]] = {
        "fp8_to_float32": lambda b: b.fp8_to_float32(codes, scales, block, 0),
        "fp8_to_bf16": lambda b: b.fp8_to_bf16(codes, scales, block, 0),
        "float_to_int4 importance": lambda b: b.float_to_int4(weight, 0, 64, METHODS["mse"], importance),
        "float_to_fp8": lambda b: b.float_to_fp8(weight, 0, block),
        "float32_to_bf16": lambda b: b.float32_to_bf16(weight.reshape(-1)),
        "bf16_to_float32": lambda b: b.bf16_to_float32(weight.view(np.uint16).reshape(-1)),
    }
    for group in (32, 64, 128):
        for name, method in METHODS.items():
            runs[f"fp8_to_int4 g{group} {name}"] = partial(_fp8_to_int4, (codes, scales, block, 0, group, method))
    packed = twin.fp8_to_int4(codes, scales, block, 0, 32, METHODS["rtn"])
    runs["int4_to_float32"] = lambda b: b.int4_to_float32(packed.packed, packed.scale, 384, 32)
    runs["int4_to_bf16"] = lambda b: b.int4_to_bf16(packed.packed, packed.scale, 384, 32)
    for name, run in runs.items():
        pairs = zip(_arrays(run(mine)), _arrays(run(twin)), strict=True)
        yield name, (float(sum(_same(torch.from_numpy(a), torch.from_numpy(b))[0] for a, b in pairs)), 0.0)


def _fp8_to_int4(arguments: tuple[Any, ...], backend: Any) -> Any:
    return backend.fp8_to_int4(*arguments)


def _arrays(result: Any) -> list[Any]:
    if isinstance(result, np.ndarray):
        return [result]
    return (
        list(result) if isinstance(result, tuple) else [result.packed, result.scale, result.error, result.energy]
    )


GROUPS: tuple[Run, ...] = (_linears, _experts, _caches, _gqa, _mla, _index, _tags, _conversions)
