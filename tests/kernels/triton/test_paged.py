"""Caches, attentions and the indexer in Triton against the torch twins (bytes) and float64 attention (values)."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quantkit_kernels.forward import cache, choice
from quantkit_kernels.forward.gqa import gqa_decode, gqa_prefill
from quantkit_kernels.forward.index import index_scores, index_topk
from quantkit_kernels.forward.mla import mla_decode, mla_prefill
from quantkit_kernels.forward.pages import GqaLayout, IndexLayout, MlaLayout
from quantkit_kernels.forward.tags import check_page_tags
from quantkit_kernels.forward.triton import gqa as triton_gqa
from quantkit_kernels.forward.triton import mla as triton_mla
from quantkit_kernels.tags import check_page_tags_twin

from ..forward import paged, test_tags

LIMIT, RMS = 2**-7, 2**-8
pytestmark = pytest.mark.usefixtures("on_triton")


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def pool(layout: Any, lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    num_pages = sum(-(-n // layout.page_size) for n in lengths) + 1
    pages = paged.fill(layout, num_pages, generator)
    return pages, *paged.tables(layout, lengths, num_pages, generator)


@pytest.mark.parametrize("kv_dtype", ["fp8", "bf16"])
def test_stores_gathers_and_copies_have_the_twins_bytes(kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd head sizes, skipped tokens, values that are zero, huge, or not finite, strided arguments."""
    layouts = (GqaLayout(3, 2, 13, kv_dtype), MlaLayout(3, kv_dtype), IndexLayout(3, kv_dtype))
    slots = torch.tensor([4, -1, 0, 17, 9, 2])
    table, lengths = torch.tensor([[1, 5, 99], [3, 0, -4]], dtype=torch.int32), torch.tensor([4, 6]).int()
    rows = normal(1, 6, 600) * torch.logspace(-30, 20, 6)[:, None].bfloat16()
    rows[2, :300], rows[3, 5], rows[4, 7] = 0, float("nan"), float("-inf")
    results: dict[str, list[Tensor]] = {}
    for name in ("torch", "triton"):
        monkeypatch.setattr(choice, "backend_for", lambda like, name=name: name)
        gqa, mla, index = (layout.allocate(6) for layout in layouts)
        cache.store_gqa(
            gqa, layouts[0], slots, rows[:, :26].unflatten(1, (13, 2)).mT, rows[:, 26:52].reshape(6, 2, 13)
        )
        cache.store_mla(mla, layouts[1], slots, rows[:, 8:520], rows[:, 520:584])
        cache.store_index_keys(index, layouts[2], slots, rows[:, 3:131])
        found = [
            *cache.gather_gqa(gqa, layouts[0], table, lengths),
            *cache.gather_mla(mla, layouts[1], table, lengths),
        ]
        found.append(cache.gather_index_keys(index, layouts[2], table, lengths))
        for pages in (gqa, mla, index):
            cache.copy_pages(pages, torch.tensor([1, 5]), torch.tensor([2, 4]))
        results[name] = [gqa, mla, index, *found]
    for mine, wanted in zip(results["triton"], results["torch"], strict=True):
        same = (mine == wanted) | (mine.isnan() & wanted.isnan()) if mine.is_floating_point() else mine == wanted
        assert same.all()


@pytest.mark.parametrize("kv_dtype", ["fp8", "bf16"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(1, 1, 7), (6, 2, 67), (17, 1, 128)])
def test_gqa_decode(heads: int, kv_heads: int, dim: int, kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_gqa, "CHUNK", 64)  # several parts
    layout = GqaLayout(7, kv_heads, dim, kv_dtype)
    lengths = [0, 1, 33, 150]
    pages, table, length = pool(layout, lengths, dim)
    query = normal(dim, 4, heads, dim)
    found = gqa_decode(query, pages, layout, table, length, scale=dim**-0.5)
    for row, n in enumerate(lengths):
        key, value = paged.context(pages, layout, table[row], n)
        wanted = paged.attention(paged.float64(query[row]), key, value, dim**-0.5)
        paged.assert_close(found[row], wanted, np.abs(value).max(initial=0), LIMIT, RMS)
    alone = gqa_decode(query[3:], pages, layout, table[3:], length[3:], scale=dim**-0.5)
    assert torch.equal(alone[0], found[3])


@pytest.mark.parametrize("is_fresh", [False, True])
@pytest.mark.parametrize("kv_dtype", ["fp8", "bf16"])
def test_gqa_prefill(kv_dtype: str, is_fresh: bool) -> None:
    layout = GqaLayout(16, 2, 33, kv_dtype)
    chunks, lengths = [1, 0, 70, 5], [1, 4, 75, 69]
    pages, table, length = pool(layout, lengths, 3)
    tokens, starts = sum(chunks), [0, *itertools.accumulate(chunks)]
    query, key, value = normal(1, tokens, 4, 33), normal(2, tokens, 2, 33), normal(3, tokens, 2, 33)
    fresh = {"fresh_key": key, "fresh_value": value} if is_fresh else {}
    found = gqa_prefill(query, pages, layout, table, torch.tensor(starts).int(), length, scale=0.2, **fresh)
    for row, n in enumerate(lengths):
        keys, values = paged.context(pages, layout, table[row], n)
        history = n - chunks[row]
        if is_fresh:
            own = slice(starts[row], starts[row + 1])
            keys = np.concatenate([keys[:history], paged.float64(key[own])])
            values = np.concatenate([values[:history], paged.float64(value[own])])
        for i in range(chunks[row]):
            seen = history + i + 1
            wanted = paged.attention(paged.float64(query[starts[row] + i]), keys[:seen], values[:seen], 0.2)
            paged.assert_close(found[starts[row] + i], wanted, np.abs(values[:seen]).max(), LIMIT, RMS)


def test_gqa_prefill_keeps_a_later_nan_from_earlier_queries() -> None:
    layout = GqaLayout(8, 1, 16, "bf16")
    pages, table, length = pool(layout, [9], 4)
    query, key, value = normal(5, 9, 2, 16), normal(6, 9, 1, 16), normal(7, 9, 1, 16)
    starts = torch.tensor([0, 9]).int()

    def run() -> Tensor:
        return gqa_prefill(
            query, pages, layout, table, starts, length, scale=0.3, fresh_key=key, fresh_value=value
        )

    plain = run()
    value[6, 0, 3], value[4, 0, 5] = float("nan"), float("inf")
    found = run()
    assert torch.equal(found[:4], plain[:4])
    assert found[4:, :, 5].isposinf().all() and found[6:, :, 3].isnan().all()
    rest = found.clone()
    rest[4:, :, 5], rest[6:, :, 3] = plain[4:, :, 5], plain[6:, :, 3]
    assert torch.equal(rest, plain)


@pytest.mark.parametrize("kv_dtype", ["fp8", "bf16"])
@pytest.mark.parametrize("chosen", [None, 70])
@pytest.mark.parametrize("heads", [1, 33])
def test_mla_decode(heads: int, chosen: int | None, kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_mla, "CHUNK", 64)
    layout, lengths = MlaLayout(7, kv_dtype), [0, 1, 90]
    pages, table, length = pool(layout, lengths, heads)
    latent, rope = normal(1, 3, heads, 512), normal(2, 3, heads, 64)
    indices = None
    if chosen is not None:
        generator = torch.Generator().manual_seed(8)
        indices = torch.full((3, chosen), -1, dtype=torch.int32)
        for row, n in enumerate(lengths):
            some = torch.randperm(n, generator=generator)[: chosen - 5].int()
            indices[row, 2 : 2 + len(some)] = some
    found = mla_decode(latent, rope, pages, layout, table, length, scale=0.04, indices=indices)
    for row, n in enumerate(lengths):
        keys, ropes = paged.context(pages, layout, table[row], n)
        if indices is not None:
            used = indices[row][indices[row] >= 0].numpy()
            keys, ropes = keys[used], ropes[used]
        query = np.concatenate([paged.float64(latent[row]), paged.float64(rope[row])], 1)
        both = np.concatenate([keys, ropes], 1)[:, None]
        wanted = paged.attention(query, both, keys[:, None], 0.04)
        paged.assert_close(found[row], wanted, np.abs(keys).max(initial=0), LIMIT, RMS)


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize(("kv_dtype", "is_fresh"), [("fp8", False), ("fp8", True), ("bf16", True)])
def test_mla_prefill(kv_dtype: str, is_fresh: bool, is_sparse: bool) -> None:
    layout, chunks, lengths = MlaLayout(5, kv_dtype), [2, 0, 3], [2, 3, 11]
    pages, table, length = pool(layout, lengths, 9)
    starts = [0, *itertools.accumulate(chunks)]
    latent, rope, new, new_rope = normal(1, 5, 3, 512), normal(2, 5, 3, 64), normal(3, 5, 512), normal(4, 5, 64)
    fresh = {"fresh_latent": new, "fresh_rope": new_rope} if is_fresh else {}
    indices = (
        torch.tensor([[0, -1, -1], [1, 0, -1], [-1, 8, 2], [9, 8, 0], [10, -1, 9]]).int() if is_sparse else None
    )
    found = mla_prefill(
        latent,
        rope,
        pages,
        layout,
        table,
        torch.tensor(starts).int(),
        length,
        scale=0.04,
        indices=indices,
        **fresh,
    )
    for row, n in enumerate(lengths):
        keys, ropes = paged.context(pages, layout, table[row], n)
        history = n - chunks[row]
        if is_fresh:
            own = slice(starts[row], starts[row + 1])
            keys = np.concatenate([keys[:history], paged.float64(new[own])])
            ropes = np.concatenate([ropes[:history], paged.float64(new_rope[own])])
        for i in range(chunks[row]):
            t = starts[row] + i
            seen = np.arange(history + i + 1) if indices is None else indices[t][indices[t] >= 0].numpy()
            query = np.concatenate([paged.float64(latent[t]), paged.float64(rope[t])], 1)
            wanted = paged.attention(
                query, np.concatenate([keys, ropes], 1)[seen][:, None], keys[seen][:, None], 0.04
            )
            paged.assert_close(found[t], wanted, np.abs(keys[seen]).max(initial=0), LIMIT, RMS)


@pytest.mark.parametrize(("heads", "kv_dtype"), [(3, "fp8"), (70, "fp8"), (5, "bf16")])
def test_index_scores(heads: int, kv_dtype: str) -> None:
    layout, lengths = IndexLayout(7, kv_dtype), [9, 140]
    pages, table, _ = pool(layout, lengths, heads)
    query, weights = normal(1, 3, heads, 128), normal(2, 3, heads).float()
    rows, visible = torch.tensor([1, 0, 1]).int(), torch.tensor([140, 0, 33]).int()
    found = index_scores(query, weights, pages, layout, table, rows, visible)
    for t, n in enumerate(visible.tolist()):
        (keys,) = paged.context(pages, layout, table[rows[t]], n)
        q, w = paged.float64(query[t]), weights[t].double().numpy()
        wanted = np.maximum(q @ keys.T, 0).T @ w
        limit = 2.0**-17 * (np.abs(w) * np.linalg.norm(q, axis=1)).sum() * np.linalg.norm(keys, axis=1)
        assert (np.abs(found[t, :n].double().numpy() - wanted) <= limit).all()
        assert found[t, n:].isneginf().all()


@pytest.mark.parametrize("k", [1, 7, 64])
def test_index_topk(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ties, both zeros, NaN, infinities, rows shorter than k."""
    scores = torch.randint(-2, 3, (6, 40), generator=torch.Generator().manual_seed(1)) / 2.0
    scores[1, 3], scores[1, 9], scores[2, ::3], scores[3, 5] = float("nan"), float("inf"), -0.0, float("-inf")
    lengths = torch.tensor([40, 40, 33, 7, 0, 1]).int()
    found = index_topk(scores, lengths, k)
    monkeypatch.setattr(choice, "backend_for", lambda like: "torch")
    assert torch.equal(found, index_topk(scores, lengths, k))


@pytest.mark.parametrize(("requests", "entries", "pages"), [(40, 7, 9), (7, 300, 1000), (3, 0, 4)])
def test_page_tags(requests: int, entries: int, pages: int) -> None:
    parts = test_tags.case(entries, requests, entries, pages)
    assert check_page_tags(*test_tags.tensors(parts)).tolist() == check_page_tags_twin(*parts).tolist()
