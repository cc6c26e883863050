"""Paged grouped-query attention on every implementation against plain float64 attention over the same bytes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantkit_kernels.forward.cache import store_gqa
from quantkit_kernels.forward.gqa import gqa_decode, gqa_prefill
from quantkit_kernels.forward.pages import GqaLayout

from . import paged

pytestmark = pytest.mark.usefixtures("each_implementation")
LIMIT, RMS = 2**-7, 2**-8  # stated in gqa.py, in units of the largest value seen
DIMS = (1, 7, 13, 33, 64, 67, 128, 129)


def largest(value: np.ndarray) -> np.ndarray:
    """The largest |value| of each head, for a result [..., Hq, D]."""
    return np.abs(value).max(axis=(0, 2), initial=0)[:, None]


def decode_case(
    layout: GqaLayout, heads: int, lengths: list[int], seed: int = 0, sharp: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    num_pages = sum(-(-n // layout.page_size) for n in lengths) + 1
    pages = paged.fill(layout, num_pages, generator)
    table, length = paged.tables(layout, lengths, num_pages, generator)
    query = (torch.randn(len(lengths), heads, layout.head_dim, generator=generator) * sharp).bfloat16()
    return query, pages, table, length


def check_decode(
    layout: GqaLayout, found: Tensor, query: Tensor, pages: Tensor, table: Tensor, length: Tensor
) -> None:
    scale = layout.head_dim**-0.5
    for row, n in enumerate(length.tolist()):
        key, value = paged.context(pages, layout, table[row], n)
        wanted = paged.attention(paged.float64(query[row]), key, value, scale)
        unit = np.repeat(largest(value), query.shape[1] // layout.num_kv_heads, axis=0)
        paged.assert_close(found[row], wanted, unit, LIMIT, RMS)
        assert n or (found[row] == 0).all()


@pytest.mark.parametrize("kv_dtype", ["fp8", "bf16"])
@pytest.mark.parametrize("dim", DIMS)
def test_decode(dim: int, kv_dtype: str) -> None:
    layout = GqaLayout(16 if dim % 2 else 13, 2, dim, kv_dtype)
    case = decode_case(layout, 6, [0, 1, 7, 33, 129], seed=dim)
    found = gqa_decode(case[0], case[1], layout, *case[2:], scale=dim**-0.5)
    check_decode(layout, found, *case)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (8, 1), (7, 7), (39, 3), (16, 2)])
def test_decode_head_groups_and_long_contexts(heads: int, kv_heads: int) -> None:
    layout = GqaLayout(64, kv_heads, 128)
    case = decode_case(layout, heads, [576, 1100], sharp=3.0)
    found = gqa_decode(case[0], case[1], layout, *case[2:], scale=128**-0.5)
    check_decode(layout, found, *case)


def test_empty_batch() -> None:
    layout = GqaLayout(4, 1, 8)
    empty, none = torch.zeros(0, 2, 8).bfloat16(), torch.zeros(0, dtype=torch.int32)
    pages, table = layout.allocate(0), torch.zeros(0, 0, dtype=torch.int32)
    assert gqa_decode(empty, pages, layout, table, none, scale=1.0).shape == (0, 2, 8)
    start = torch.zeros(1, dtype=torch.int32)
    assert gqa_prefill(empty, pages, layout, table, start, none, scale=1.0).shape == (0, 2, 8)


def prefill_case(
    layout: GqaLayout, heads: int, chunks: list[tuple[int, int]], seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Requests of (history, queries): query, pages, table, cu_queries, lengths, fresh key and value."""
    lengths = [h + q for h, q in chunks]
    _, pages, table, length = decode_case(layout, heads, lengths, seed)
    starts = torch.tensor(np.cumsum([0, *(q for _, q in chunks)]), dtype=torch.int32)
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(int(starts[-1]), heads, layout.head_dim, generator=generator).bfloat16()
    key, value = (
        torch.randn(int(starts[-1]), layout.num_kv_heads, layout.head_dim, generator=generator).bfloat16()
        for _ in range(2)
    )
    return query, pages, table, starts, length, key, value


def check_prefill(
    layout: GqaLayout, found: Tensor, case: tuple[Tensor, ...], is_fresh: bool, scale: float
) -> None:
    query, pages, table, starts, length, fresh_key, fresh_value = case
    for row, n in enumerate(length.tolist()):
        first, last = int(starts[row]), int(starts[row + 1])
        history = n - (last - first)
        key, value = paged.context(pages, layout, table[row], history if is_fresh else n)
        if is_fresh:
            key = np.concatenate([key, paged.float64(fresh_key[first:last])])
            value = np.concatenate([value, paged.float64(fresh_value[first:last])])
        for t in range(first, last):
            seen = history + t - first + 1
            wanted = paged.attention(paged.float64(query[t]), key[:seen], value[:seen], scale)
            unit = np.repeat(largest(value[:seen]), query.shape[1] // layout.num_kv_heads, axis=0)
            paged.assert_close(found[t], wanted, unit, LIMIT, RMS)


@pytest.mark.parametrize("is_fresh", [False, True], ids=["stored", "fresh"])
@pytest.mark.parametrize("kv_dtype", ["fp8", "bf16"])
@pytest.mark.parametrize(("dim", "heads", "kv_heads"), [(33, 6, 2), (128, 4, 1), (7, 3, 3), (67, 1, 1)])
def test_prefill(dim: int, heads: int, kv_heads: int, kv_dtype: str, is_fresh: bool) -> None:
    layout = GqaLayout(16, kv_heads, dim, kv_dtype)
    case = prefill_case(layout, heads, [(0, 7), (33, 13), (70, 1), (5, 0), (0, 0), (100, 67)], seed=dim)
    fresh = {"fresh_key": case[5], "fresh_value": case[6]} if is_fresh else {}
    found = gqa_prefill(case[0], case[1], layout, *case[2:5], scale=dim**-0.5, **fresh)
    check_prefill(layout, found, case, is_fresh, dim**-0.5)


def test_fresh_chunk_needs_no_pages() -> None:
    layout = GqaLayout(16, 2, 64)
    case = prefill_case(layout, 4, [(0, 67)])
    empty = torch.zeros(1, 0, dtype=torch.int32)
    found = gqa_prefill(
        case[0], layout.allocate(0), layout, empty, *case[3:5], scale=0.1, fresh_key=case[5], fresh_value=case[6]
    )
    check_prefill(layout, found, case, True, 0.1)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_tables(data: st.DataObject) -> None:
    layout = GqaLayout(
        data.draw(st.integers(1, 70)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 40)),
        data.draw(st.sampled_from(["fp8", "bf16"])),
    )  # fmt: skip
    lengths = data.draw(st.lists(st.integers(0, 150), min_size=1, max_size=4))
    heads = layout.num_kv_heads * data.draw(st.integers(1, 5))
    case = decode_case(layout, heads, lengths, data.draw(st.integers(0, 999)))
    found = gqa_decode(case[0], case[1], layout, *case[2:], scale=layout.head_dim**-0.5)
    check_decode(layout, found, *case)


def test_alone_in_a_batch_and_in_two_threads() -> None:
    layout = GqaLayout(16, 2, 128)
    lengths = [1100, 3, 0, 511, 512, 513, 64]
    query, pages, table, length = decode_case(layout, 8, lengths)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = gqa_decode(query, pages, layout, table, length, scale=0.09)
        for row in range(len(lengths)):
            some = slice(row, row + 1)
            alone = gqa_decode(query[some], pages, layout, table[some], length[some], scale=0.09)
            assert torch.equal(alone[0], whole[row])
        torch.set_num_threads(2)
        assert torch.equal(gqa_decode(query, pages, layout, table, length, scale=0.09), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("threads", [1, 2])
def test_no_context_gives_zeros_beside_rows_of_nan(threads: int) -> None:
    """What another block left in a thread's memory is not part of a sum of nothing."""
    layout = GqaLayout(64, 1, 64, "bf16")
    pages = layout.allocate(10)
    key = torch.ones(640, 1, 64).bfloat16()
    store_gqa(pages, layout, torch.arange(640), key, key * math.nan)
    query, before = torch.ones(7, 2, 64).bfloat16(), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for lengths in ([600] * 6 + [0], [0] + [600] * 6, [600, 0] * 3 + [0]):
            table, length = torch.arange(10).int().repeat(7, 1), torch.tensor(lengths, dtype=torch.int32)
            found = gqa_decode(query, pages, layout, table, length, scale=0.1)
            assert (found[length == 0] == 0).all() and found[length > 0].isnan().all()
    finally:
        torch.set_num_threads(before)


def test_prefill_alone_in_chunks_and_in_two_threads(each_implementation: str) -> None:
    layout = GqaLayout(16, 2, 64)
    query, pages, table, starts, length, key, value = prefill_case(layout, 6, [(33, 70), (0, 129)])
    fresh = {"fresh_key": key, "fresh_value": value}
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for extra in ({}, fresh):
            torch.set_num_threads(1)
            whole = gqa_prefill(query, pages, layout, table, starts, length, scale=0.1, **extra)
            torch.set_num_threads(2)
            assert torch.equal(gqa_prefill(query, pages, layout, table, starts, length, scale=0.1, **extra), whole)
            second = {name: part[70:] for name, part in extra.items()}
            begin = torch.tensor([0, 129], dtype=torch.int32)
            alone = gqa_prefill(query[70:], pages, layout, table[1:], begin, length[1:], scale=0.1, **second)
            assert torch.equal(alone, whole[70:])
        if each_implementation != "torch":  # stored keys: where a prompt is cut must not show
            whole = gqa_prefill(query, pages, layout, table, starts, length, scale=0.1)
            begin = torch.tensor([0, 59], dtype=torch.int32)
            rest = gqa_prefill(query[140:], pages, layout, table[1:], begin, length[1:], scale=0.1)
            assert torch.equal(rest, whole[140:])
    finally:
        torch.set_num_threads(threads)


def test_strides_offsets_and_out() -> None:
    layout = GqaLayout(5, 2, 33)
    query, pages, table, length = decode_case(layout, 4, [12, 40])
    plain = gqa_decode(query, pages, layout, table, length, scale=0.2)
    wide = torch.zeros(2, layout.page_bytes * pages.shape[0]).to(torch.uint8)
    spread = torch.zeros(pages.shape[0], layout.page_bytes + 8, dtype=torch.uint8)
    spread[:, 4:-4] = pages
    strided = torch.zeros(33, 2, 9, dtype=torch.bfloat16).permute(1, 2, 0)[:, 1::2]
    strided.copy_(query)
    two = torch.stack([table, table], 1)[:, 1]
    out = torch.full((3, 4, 33), 7.0).bfloat16()
    found = gqa_decode(strided, spread[:, 4:-4], layout, two, length, scale=0.2, out=out[1:])
    assert found.data_ptr() == out[1:].data_ptr() and torch.equal(found, plain) and (out[0] == 7).all()
    assert wide.numel() and (spread[:, :4] == 0).all()


def test_nan_and_inf_reach_those_that_see_them() -> None:
    layout = GqaLayout(16, 2, 64)
    query, pages, table, length = decode_case(layout, 4, [40, 40, 40, 40])
    clean = gqa_decode(query, pages, layout, table, length, scale=0.1)
    views = layout.views(pages)
    assert views.key_scale is not None
    views.value.view(torch.uint8)[table[0, 0].item(), 0, 3, 5] = 0x7F  # one value: heads 0 and 1, column 5
    views.key.view(torch.uint8)[table[1, 1].item(), 1, 2, 0] = 0xFF  # one key: heads 2 and 3, everything
    views.key_scale[table[2, 0].item(), 0, 1] = math.inf
    query[3, 1, 0] = math.nan
    found = gqa_decode(query, pages, layout, table, length, scale=0.1)
    bad = torch.zeros_like(found, dtype=torch.bool)
    bad[0, :2, 5] = bad[1, 2:] = bad[3, 1] = True
    assert found[bad].isnan().all()
    bad[2, :2] = True  # an infinite score: NaN or the one value
    assert torch.equal(found[~bad], clean[~bad])


def test_a_later_nan_does_not_reach_earlier_queries(each_implementation: str) -> None:
    layout = GqaLayout(16, 1, 64)
    case = list(prefill_case(layout, 2, [(10, 30)]))
    query, pages, table, starts, length, key, value = case
    for extra in ({}, {"fresh_key": key.clone(), "fresh_value": value.clone()}):
        clean = gqa_prefill(query, pages, layout, table, starts, length, scale=0.1, **extra)
        if extra:
            extra["fresh_key"][20], extra["fresh_value"][20] = math.nan, math.nan
        else:
            broken = pages.clone()
            views = layout.views(broken)
            views.value.view(torch.uint8)[table[0, 1].item(), 0, 14] = 0x7F  # position 30: query 20
            views.key.view(torch.uint8)[table[0, 1].item(), 0, 14] = 0x7F
        found = gqa_prefill(query, pages if extra else broken, layout, table, starts, length, scale=0.1, **extra)
        assert found[20:].isnan().all()
        paged.assert_same(each_implementation, found[:20], clean[:20])


LAYOUT = GqaLayout(4, 2, 8)


def arguments() -> dict[str, Any]:
    return {
        "query": torch.zeros(2, 4, 8).bfloat16(), "pages": LAYOUT.allocate(3), "layout": LAYOUT,
        "block_table": torch.tensor([[0, 1], [2, 0]], dtype=torch.int32),
        "lengths": torch.tensor([8, 3], dtype=torch.int32), "scale": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("query", torch.zeros(2, 4, 8)), ("query", torch.zeros(2, 3, 8).bfloat16()),
        ("query", torch.zeros(3, 4, 8).bfloat16()), ("query", torch.zeros(2, 4, 9).bfloat16()),
        ("query", torch.zeros(2, 0, 8).bfloat16()),
        ("pages", torch.zeros(3, 9, dtype=torch.uint8)),
        ("block_table", torch.tensor([[0, 3], [2, 0]], dtype=torch.int32)),
        ("block_table", torch.tensor([[0, 1], [-1, 0]], dtype=torch.int32)),
        ("block_table", torch.tensor([[0, 1], [2, 0]])),
        ("block_table", torch.zeros(2, 4, dtype=torch.int32)[:, ::2]),
        ("lengths", torch.tensor([9, 3], dtype=torch.int32)),
        ("lengths", torch.tensor([-1, 3], dtype=torch.int32)),
        ("lengths", torch.tensor([8, 3])), ("out", torch.zeros(2, 4, 8)), ("out", torch.zeros(1, 4, 8).bfloat16()),
        ("out", torch.zeros(2, 4, 16).bfloat16()[..., ::2]),
    ],
)  # fmt: skip
def test_wrong_arguments_name_themselves(name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=name):
        gqa_decode(**{**arguments(), name: value})


def test_out_that_overlaps() -> None:
    given_values = arguments()
    with pytest.raises(ValueError, match=r"out shares memory with query"):
        gqa_decode(**given_values, out=given_values["query"])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("cu_queries", {"cu_queries": torch.tensor([0, 1, 3], dtype=torch.int32)}),
        ("cu_queries", {"cu_queries": torch.tensor([1, 1, 2], dtype=torch.int32)}),
        ("cu_queries", {"cu_queries": torch.tensor([0, 3, 2], dtype=torch.int32)}),
        ("cu_queries", {"cu_queries": torch.tensor([0, 2], dtype=torch.int32)}),
        ("lengths", {"lengths": torch.tensor([8, 0], dtype=torch.int32)}),
        ("fresh_value", {"fresh_key": torch.zeros(2, 2, 8).bfloat16()}),
        (
            "fresh_key",
            {"fresh_key": torch.zeros(1, 2, 8).bfloat16(), "fresh_value": torch.zeros(2, 2, 8).bfloat16()},
        ),
    ],
)
def test_wrong_arguments_of_prefill_name_themselves(name: str, change: dict[str, Any]) -> None:
    given_values = {**arguments(), "cu_queries": torch.tensor([0, 1, 2], dtype=torch.int32)}
    with pytest.raises((TypeError, ValueError), match=name):
        gqa_prefill(**{**given_values, **change})
