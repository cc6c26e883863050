"""Tables and slots that are checked once for a step: the same results, nothing read again, nothing let through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit_kernels.forward import table as checks
from quantkit_kernels.forward.cache import gather_gqa, gather_index_keys, gather_mla, store_gqa
from quantkit_kernels.forward.checked import checked_decode, checked_prefill, checked_slots
from quantkit_kernels.forward.gqa import gqa_decode, gqa_prefill
from quantkit_kernels.forward.index import index_scores
from quantkit_kernels.forward.mla import mla_decode, mla_prefill
from quantkit_kernels.forward.pages import GqaLayout, IndexLayout, MlaLayout

from . import paged

GQA, MLA, INDEX = GqaLayout(5, 2, 16), MlaLayout(5), IndexLayout(5)
NUM_PAGES = 12
LENGTHS, SIZES = [0, 1, 13, 22], [0, 1, 4, 9]


def setting() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    table, lengths = paged.tables(GQA, LENGTHS, NUM_PAGES, generator)
    starts = torch.tensor([0, 0, 1, 5, 14], dtype=torch.int32)
    return {
        "pages": {layout: paged.fill(layout, NUM_PAGES, generator) for layout in (GQA, MLA, INDEX)},
        "table": table, "lengths": lengths, "starts": starts,
        "query": torch.randn(14, 4, 16, generator=generator).bfloat16(),
        "latent": torch.randn(14, 3, 512, generator=generator).bfloat16(),
        "rope": torch.randn(14, 3, 64, generator=generator).bfloat16(),
        "keys": torch.randn(14, 3, 128, generator=generator).bfloat16(),
        "weights": torch.rand(14, 3, generator=generator),
        "fresh": torch.randn(14, 2, 16, generator=generator).bfloat16(),
    }  # fmt: skip


def decode_calls(s: dict[str, Any], table: Any, lengths: Tensor, rows: Tensor) -> list[Callable[[], Any]]:
    pages = s["pages"]
    return [
        lambda: gqa_decode(s["query"][:4], pages[GQA], GQA, table, lengths, scale=0.2),
        lambda: mla_decode(s["latent"][:4], s["rope"][:4], pages[MLA], MLA, table, lengths, scale=0.05),
        lambda: index_scores(s["keys"][:4], s["weights"][:4], pages[INDEX], INDEX, table, rows, lengths),
        lambda: torch.cat(gather_gqa(pages[GQA], GQA, table, lengths)),
        lambda: torch.cat(gather_mla(pages[MLA], MLA, table, lengths), -1),
        lambda: gather_index_keys(pages[INDEX], INDEX, table, lengths),
    ]


def prefill_calls(
    s: dict[str, Any], table: Any, starts: Tensor, lengths: Tensor, rows: Tensor, visible: Tensor
) -> list[Callable[[], Any]]:
    pages, chunk = s["pages"], (starts, lengths)
    return [
        lambda: gqa_prefill(s["query"], pages[GQA], GQA, table, *chunk, scale=0.2),
        lambda: mla_prefill(s["latent"], s["rope"], pages[MLA], MLA, table, *chunk, scale=0.05),
        lambda: index_scores(s["keys"], s["weights"], pages[INDEX], INDEX, table, rows, visible),
    ]


def numbers() -> tuple[Tensor, Tensor]:
    """Row and visible tokens of each of the 14 queries, counted one by one."""
    each = [
        (r, n - size + i + 1) for r, (n, size) in enumerate(zip(LENGTHS, SIZES, strict=True)) for i in range(size)
    ]
    rows, visible = (torch.tensor(part, dtype=torch.int32) for part in zip(*each, strict=True))
    return rows, visible


def read_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "values", lambda tensor: pytest.fail("a tensor's numbers were read"))


def test_decode_is_the_same_and_reads_nothing(each_implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s = setting()
    wanted = [c() for c in decode_calls(s, s["table"], s["lengths"], torch.arange(4, dtype=torch.int32))]
    step = checked_decode(s["table"], s["lengths"], page_size=5, num_pages=NUM_PAGES)
    read_nothing(monkeypatch)
    for _ in range(2):
        found = [call() for call in decode_calls(s, step, step.lengths, step.rows)]
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_prefill_is_the_same_and_reads_nothing(each_implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s = setting()
    wanted = [c() for c in prefill_calls(s, s["table"], s["starts"], s["lengths"], *numbers())]
    step = checked_prefill(s["table"], s["starts"], s["lengths"], page_size=5, num_pages=NUM_PAGES)
    assert torch.equal(step.rows, numbers()[0]) and torch.equal(step.visible, numbers()[1])
    assert step.cu_queries is not None
    read_nothing(monkeypatch)
    found = [c() for c in prefill_calls(s, step, step.cu_queries, step.lengths, step.rows, step.visible)]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_fresh_keys_need_no_pages(each_implementation: str) -> None:
    s = setting()
    starts, lengths = torch.tensor([0, 14], dtype=torch.int32), torch.tensor([14], dtype=torch.int32)
    none = torch.zeros(1, 0, dtype=torch.int32)
    step = checked_prefill(none, starts, lengths, page_size=5, num_pages=0, is_fresh=True)
    assert step.cu_queries is not None
    fresh = {"fresh_key": s["fresh"], "fresh_value": s["fresh"], "scale": 0.2}
    given = (step, step.cu_queries, step.lengths)
    found = gqa_prefill(s["query"], s["pages"][GQA], GQA, *given, **fresh)
    assert torch.equal(found, gqa_prefill(s["query"], s["pages"][GQA], GQA, none, starts, lengths, **fresh))
    with pytest.raises(ValueError, match="checked for fresh keys and values"):
        gqa_prefill(s["query"], s["pages"][GQA], GQA, *given, scale=0.2)
    with pytest.raises(ValueError, match="checked for fresh keys and values"):
        index_scores(s["keys"], s["weights"], s["pages"][INDEX], INDEX, step, step.rows, step.visible)
    with pytest.raises(ValueError, match="lengths must lie in"):
        checked_prefill(none, starts, lengths, page_size=5, num_pages=0)


def test_indices_are_still_compared_with_what_a_query_sees() -> None:
    s = setting()
    step = checked_decode(s["table"], s["lengths"], page_size=5, num_pages=NUM_PAGES)
    good = torch.tensor([[-1], [0], [12], [21]], dtype=torch.int32)
    call = (s["latent"][:4], s["rope"][:4], s["pages"][MLA], MLA, step, step.lengths)
    assert mla_decode(*call, scale=0.1, indices=good).isfinite().all()
    with pytest.raises(ValueError, match="indices must be"):
        mla_decode(*call, scale=0.1, indices=good + 1)


def test_the_caller_may_reuse_his_buffers() -> None:
    """A page that is written into them afterwards has not been checked."""
    s = setting()
    table, lengths = s["table"].clone(), s["lengths"].clone()
    step = checked_decode(table, lengths, page_size=5, num_pages=NUM_PAGES)
    before = gqa_decode(s["query"][:4], s["pages"][GQA], GQA, step, step.lengths, scale=0.2)
    table.fill_(2**31 - 1), lengths.fill_(2**30)
    assert torch.equal(gqa_decode(s["query"][:4], s["pages"][GQA], GQA, step, step.lengths, scale=0.2), before)


def test_wrong_numbers_are_refused_when_the_table_is_made() -> None:
    s = setting()
    good = {"block_table": s["table"], "lengths": s["lengths"], "page_size": 5, "num_pages": NUM_PAGES}
    for name, value, error in (
        ("block_table", s["table"] + NUM_PAGES, ValueError), ("block_table", s["table"].long(), TypeError),
        ("block_table", s["table"][0], ValueError), ("lengths", s["lengths"] + 1000, ValueError),
        ("lengths", s["lengths"][:2], ValueError), ("lengths", s["lengths"] - 1, ValueError),
        ("page_size", 0, ValueError), ("page_size", 5.0, TypeError), ("num_pages", -1, ValueError),
    ):  # fmt: skip
        with pytest.raises(error, match=name):
            checked_decode(**good | {name: value})
    for starts in ([0, 0, 1, 5], [1, 1, 1, 5, 14], [0, 0, 5, 1, 14], [0, 3, 3, 5, 14]):
        with pytest.raises(ValueError, match=r"cu_queries|lengths\[0\]"):
            checked_prefill(**good, cu_queries=torch.tensor(starts, dtype=torch.int32))


def test_it_belongs_to_its_layout_pool_and_tensors() -> None:
    s = setting()
    step = checked_decode(s["table"], s["lengths"], page_size=5, num_pages=NUM_PAGES)
    query, pages = s["query"][:4], s["pages"][GQA]
    chunk = checked_prefill(s["table"], s["starts"], s["lengths"], page_size=5, num_pages=NUM_PAGES)
    assert chunk.cu_queries is not None
    with pytest.raises(ValueError, match="lengths must be the tensor of the checked block_table"):
        gqa_decode(query, pages, GQA, step, s["lengths"], scale=0.2)
    with pytest.raises(ValueError, match="cu_queries must be the tensor of the checked block_table"):
        gqa_prefill(s["query"], pages, GQA, chunk, s["starts"], chunk.lengths, scale=0.2)
    with pytest.raises(ValueError, match="checked for 12 pages of 5 tokens, pages are 11 of 5"):
        gqa_decode(query, pages[:11], GQA, step, step.lengths, scale=0.2)
    with pytest.raises(ValueError, match="checked for 12 pages of 5 tokens, pages are 12 of 4"):
        other = GqaLayout(4, 2, 16)
        gqa_decode(query, other.allocate(12), other, step, step.lengths, scale=0.2)
    with pytest.raises(ValueError, match="checked for a prefill"):
        gqa_decode(query, pages, GQA, chunk, chunk.lengths, scale=0.2)
    with pytest.raises(ValueError, match="checked for a decode"):
        gqa_prefill(query, pages, GQA, step, s["starts"], step.lengths, scale=0.2)
    with pytest.raises(ValueError, match="cu_queries must rise from 0 to the 13"):
        gqa_prefill(s["query"][:13], pages, GQA, chunk, chunk.cu_queries, chunk.lengths, scale=0.2)
    with pytest.raises(ValueError, match="query must be of shape"):
        gqa_decode(s["query"][:3], pages, GQA, step, step.lengths, scale=0.2)


def test_slots_are_checked_once(each_implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s = setting()
    slots = torch.tensor([7, -1, 0, 59])
    pools = [s["pages"][GQA].clone() for _ in range(2)]
    store_gqa(pools[0], GQA, slots, s["fresh"][:4], s["fresh"][:4])
    once = checked_slots(slots, page_size=5, num_pages=NUM_PAGES)
    read_nothing(monkeypatch)
    slots.fill_(10**9)
    store_gqa(pools[1], GQA, once, s["fresh"][:4], s["fresh"][:4])
    assert torch.equal(*pools)
    with pytest.raises(ValueError, match="slots must be of shape"):
        store_gqa(pools[1], GQA, once, s["fresh"][:3], s["fresh"][:3])
    with pytest.raises(ValueError, match="slots were checked for 60 tokens, pages hold 55"):
        store_gqa(pools[1][:11], GQA, once, s["fresh"][:4], s["fresh"][:4])


def test_wrong_slots_are_refused() -> None:
    for wrong in ([60], [-2], [3, 3]):
        with pytest.raises(ValueError, match="slots"):
            checked_slots(torch.tensor(wrong), page_size=5, num_pages=NUM_PAGES)
    with pytest.raises(TypeError, match="slots"):
        checked_slots(torch.tensor([1], dtype=torch.int32), page_size=5, num_pages=NUM_PAGES)


def test_tensors_are_copies() -> None:
    s = setting()
    step = checked_prefill(s["table"], s["starts"], s["lengths"], page_size=5, num_pages=NUM_PAGES)
    own = {value.data_ptr() for f in fields(step) if isinstance(value := getattr(step, f.name), Tensor)}
    assert len(own) == 5 and not own & {s[name].data_ptr() for name in ("table", "starts", "lengths")}
