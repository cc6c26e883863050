"""The DSA indexer on every implementation: scores against float64 and transformers, top-k against a plain sort."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantkit_kernels.forward.index import index_scores, index_topk
from quantkit_kernels.forward.pages import IndexLayout

from . import paged

pytestmark = pytest.mark.usefixtures("each_implementation")


def case(layout: IndexLayout, heads: int, lengths: list[int], tokens: int, seed: int = 0) -> tuple[Tensor, ...]:
    """query, head_weights, pages, block_table, rows, visible lengths of ``tokens`` queries over random rows."""
    generator = torch.Generator().manual_seed(seed)
    num_pages = sum(-(-n // layout.page_size) for n in lengths) + 1
    pages = paged.fill(layout, num_pages, generator)
    table, _ = paged.tables(layout, lengths, num_pages, generator)
    rows = torch.randint(0, len(lengths), (tokens,), generator=generator).int()
    seen = [int(torch.randint(0, lengths[r] + 1, (1,), generator=generator)) for r in rows.tolist()]
    query = torch.randn(tokens, heads, 128, generator=generator).bfloat16()
    weights = torch.randn(tokens, heads, generator=generator)
    return query, weights, pages, table, rows, torch.tensor(seen, dtype=torch.int32)


@pytest.mark.parametrize("kv_dtype", ["fp8", "bf16"])
@pytest.mark.parametrize(("heads", "tokens"), [(1, 7), (4, 1), (13, 5), (32, 33), (64, 3)])
def test_scores(heads: int, tokens: int, kv_dtype: str) -> None:
    layout = IndexLayout(64 if heads % 2 else 7, kv_dtype)
    query, weights, pages, table, rows, seen = case(layout, heads, [0, 1, 33, 129, 200], tokens, heads)
    found = index_scores(query, weights, pages, layout, table, rows, seen)
    assert found.shape == (tokens, int(seen.max())) and found.dtype == torch.float32
    for t in range(tokens):
        n = int(seen[t])
        (key,) = paged.context(pages, layout, table[rows[t]], n)
        products = key @ paged.float64(query[t]).T  # [n, Hi]
        wanted = np.maximum(products, 0) @ paged.float64(weights[t])
        size = np.linalg.norm(key, axis=1)[:, None] * np.linalg.norm(paged.float64(query[t]), axis=1)
        bound = 2**-17 * (size @ np.abs(paged.float64(weights[t])))
        assert (np.abs(paged.float64(found[t, :n]) - wanted) <= bound + 1e-30).all()
        assert (found[t, n:] == -math.inf).all()


def test_scores_are_those_of_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.glm_moe_dsa.modeling_glm_moe_dsa")
    configuration = pytest.importorskip("transformers.models.glm_moe_dsa.configuration_glm_moe_dsa")
    torch.manual_seed(0)
    config = configuration.GlmMoeDsaConfig(
        hidden_size=32, q_lora_rank=24, index_n_heads=8, index_head_dim=128, qk_rope_head_dim=64, index_topk=9
    )
    indexer, length = modeling.GlmMoeDsaIndexer(config, 0).float(), 50
    hidden, residual = torch.randn(1, length, 32), torch.randn(1, length, 24)
    query, key = indexer.wq_b(residual).view(length, 8, 128), indexer.k_norm(indexer.wk(hidden))[0]
    query, key = query.detach().bfloat16(), key.detach().bfloat16()
    plain = torch.ones(1, length, 64), torch.zeros(1, length, 64)  # cos and sin: the rotation is the caller's
    with torch.no_grad():  # its own projections, replaced by ours in bf16; pairs are taken apart by the "rotation"
        order = torch.cat([torch.arange(0, 64, 2), torch.arange(1, 64, 2), torch.arange(64, 128)])
        indexer.wq_b.forward = lambda _: query.float().view(1, length, -1)
        indexer.k_norm.forward = lambda _: key.float()[None]
        causal = torch.ones(length, length, dtype=torch.bool).tril()[None]
        theirs = indexer(hidden, residual, plain, causal, torch.arange(length)[None])[0]
        weights = indexer.weights_proj(hidden)[0] * (8**-0.5 * 128**-0.5)
    layout = IndexLayout(16, "bf16")
    pages = layout.allocate(4)
    layout.views(pages).key.flatten(0, 1)[:length] = key[:, order]
    seen = torch.arange(1, length + 1, dtype=torch.int32)
    scores = index_scores(
        query[..., order],
        weights,
        pages,
        layout,
        torch.arange(4, dtype=torch.int32)[None],
        torch.zeros_like(seen),
        seen,
    )
    ours = index_topk(scores, seen, 9)
    for t in range(length):
        visible = {i for i in theirs[t].tolist() if i <= t}
        assert set(ours[t].tolist()) - {-1} == visible


def test_scores_alone_in_a_batch_and_in_two_threads() -> None:
    layout = IndexLayout(16)
    query, weights, pages, table, rows, seen = case(layout, 8, [300, 20, 700], 9)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = index_scores(query, weights, pages, layout, table, rows, seen)
        for t in range(9):
            s = slice(t, t + 1)
            alone = index_scores(query[s], weights[s], pages, layout, table, rows[s], seen[s])
            assert torch.equal(alone[0], whole[t, : int(seen[t])])
        torch.set_num_threads(2)
        assert torch.equal(index_scores(query, weights, pages, layout, table, rows, seen), whole)
    finally:
        torch.set_num_threads(threads)


def test_nan_scores_stay_nan() -> None:
    layout = IndexLayout(16)
    query, weights, pages, table, rows, seen = case(layout, 8, [64], 4)
    seen[:] = torch.tensor([64, 30, 64, 64])
    clean = index_scores(query, weights, pages, layout, table, rows, seen)
    layout.views(pages).key.view(torch.uint8)[table[0, 2].item(), 8, 127] = 0xFF  # position 40
    query[2, 3, 0] = math.nan
    weights[3, 0] = math.nan
    found = index_scores(query, weights, pages, layout, table, rows, seen)
    assert found[:2, 40].isnan().tolist() == [True, False] and found[2:].isnan().all()
    found[0, 40] = clean[0, 40]
    assert torch.equal(found[:2], clean[:2])


def plain_topk(row: list[float], k: int) -> list[int]:
    ranked = sorted(range(len(row)), key=lambda i: (not math.isnan(row[i]), -row[i] if row[i] == row[i] else 0, i))
    chosen = sorted(ranked[:k])
    return chosen + [-1] * (k - len(chosen))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_topk(data: st.DataObject) -> None:
    """Few different values, so that ties are everywhere; NaN, infinities and both zeros among them."""
    columns = data.draw(st.integers(1, 90))
    value = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, 1e-42, math.inf, -math.inf, math.nan]) | st.floats(
        width=32
    )
    rows = data.draw(st.lists(st.lists(value, min_size=columns, max_size=columns), min_size=1, max_size=3))
    lengths = [data.draw(st.integers(0, columns)) for _ in rows]
    k = data.draw(st.integers(1, columns + 5))
    found = index_topk(torch.tensor(rows, dtype=torch.float32), torch.tensor(lengths, dtype=torch.int32), k)
    assert found.tolist() == [plain_topk(row[:n], k) for row, n in zip(rows, lengths, strict=True)]


@pytest.mark.parametrize(("columns", "k"), [(5000, 2048), (3000, 1), (2048, 2048), (129, 128)])
def test_topk_of_many(columns: int, k: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    wide = torch.randn(3, columns + 7, generator=generator)
    scores = wide[:, 5:-2]  # strided and offset
    scores[1] = scores[1].mul(4).round().relu()
    scores[2] = -1.5
    lengths = torch.tensor([columns, columns - 17, columns], dtype=torch.int32)
    found = index_topk(scores, lengths, k)
    assert found.dtype == torch.int32
    assert found.tolist() == [plain_topk(scores[t, : int(lengths[t])].tolist(), k) for t in range(3)]


def test_nothing_to_score() -> None:
    layout = IndexLayout(4)
    pages, table = layout.allocate(1), torch.zeros(1, 1, dtype=torch.int32)
    none = torch.zeros(0, dtype=torch.int32)
    empty = index_scores(torch.zeros(0, 2, 128).bfloat16(), torch.zeros(0, 2), pages, layout, table, none, none)
    assert empty.shape == (0, 0)
    zero = torch.zeros(2, dtype=torch.int32)
    found = index_scores(torch.zeros(2, 2, 128).bfloat16(), torch.zeros(2, 2), pages, layout, table, zero, zero)
    assert found.shape == (2, 0)
    assert index_topk(found, zero, 3).tolist() == [[-1] * 3] * 2


LAYOUT = IndexLayout(4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("query", torch.zeros(2, 3, 127).bfloat16()), ("query", torch.zeros(2, 3, 128)),
        ("head_weights", torch.zeros(2, 4)), ("head_weights", torch.zeros(2, 3).bfloat16()),
        ("pages", torch.zeros(3, 4, dtype=torch.uint8)),
        ("block_table", torch.tensor([[0, 3]], dtype=torch.int32)),
        ("rows", torch.tensor([0, 1], dtype=torch.int32)), ("rows", torch.tensor([-1, 0], dtype=torch.int32)),
        ("rows", torch.tensor([0, 0])), ("lengths", torch.tensor([9, 0], dtype=torch.int32)),
        ("lengths", torch.tensor([0], dtype=torch.int32)),
    ],
)  # fmt: skip
def test_wrong_arguments_name_themselves(name: str, value: Any) -> None:
    given_values = {
        "query": torch.zeros(2, 3, 128).bfloat16(), "head_weights": torch.zeros(2, 3), "pages": LAYOUT.allocate(3),
        "layout": LAYOUT, "block_table": torch.tensor([[0, 1]], dtype=torch.int32),
        "rows": torch.zeros(2, dtype=torch.int32), "lengths": torch.tensor([8, 3], dtype=torch.int32),
    }  # fmt: skip
    with pytest.raises((TypeError, ValueError), match=name):
        index_scores(**{**given_values, name: value})


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("scores", (torch.zeros(2, 3).bfloat16(), torch.zeros(2, dtype=torch.int32), 1)),
        ("scores", (torch.zeros(3, 2).T, torch.zeros(2, dtype=torch.int32), 1)),
        ("lengths", (torch.zeros(2, 3), torch.tensor([4, 0], dtype=torch.int32), 1)),
        ("k", (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int32), 0)),
        ("k", (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int32), 1.0)),
    ],
)
def test_wrong_arguments_of_topk_name_themselves(name: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises((TypeError, ValueError), match=name):
        index_topk(*arguments)
