"""Block tables and the check before a step, held against lists and loops."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit_serve.paging import BlockTables, Entries, PagePool, PageRef, TagCheck, block_tables

ROWS, WIDTH, PAGES = 3, 6, 9
Pair = tuple[Entries[int], Entries[PageRef]]


def pairs(pool: PagePool, *counts: int) -> list[Pair]:
    found = []
    for i, count in enumerate(counts):
        refs = pool.allocate(count, f"r{i}")
        found.append((Entries(ref.page for ref in refs), Entries(refs)))
    return found


def fill(tables: BlockTables, batch: list[Pair]) -> list[list[int]]:
    table = tables.fill([pages for pages, _ in batch], [refs for _, refs in batch])
    assert table.dtype == np.int32 and table.flags.c_contiguous
    return [table[row, : len(pages)].tolist() for row, (pages, _) in enumerate(batch)]


CHANGES = st.lists(
    st.tuples(
        st.integers(0, 4),  # whose
        st.sampled_from(["table", "expected", "both"]),
        st.sampled_from(["append", "extend", "set", "truncate", "clear", "replace", "free", "nothing"]),
        st.integers(0, PAGES - 1),
        st.lists(st.integers(0, 4), unique=True, max_size=ROWS),  # the next step
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=100, deadline=None)
@given(changes=CHANGES)
def test_any_change_is_seen(changes: list[tuple[int, str, str, int, list[int]]]) -> None:
    """More sequences than rows, two sets of tables over the same lists, entries changed anywhere."""
    pool = PagePool(PAGES)
    assert pool.tags is not None
    now = pool.tags
    pool.allocate(PAGES, "all")
    both = TagCheck(pool, ROWS, WIDTH), TagCheck(pool, ROWS, WIDTH)
    sequences: list[Pair] = [(Entries(), Entries()) for _ in range(5)]
    for turn, (who, which, what, page, batch) in enumerate(changes):
        table, expected = sequences[who]
        if what == "replace":
            sequences[who] = (Entries(table.items), Entries(expected.items))
        elif what == "free":
            pool.release([PageRef(page, int(now[page]))], "all")
            if not pool.owners(page):
                pool.allocate(1, "all")
        else:
            if which != "expected":
                change(table, what, page)
            if which != "table":
                change(expected, what, PageRef(page, int(now[page])))
        check(both[turn % 2], [sequences[i] for i in batch], now)


def change(entries: Entries[Any], what: str, item: Any) -> None:
    if what in ("append", "extend") and len(entries) < WIDTH:
        entries.append(item) if what == "append" else entries.extend([item])
    elif what == "set" and len(entries):
        entries[len(entries) // 2] = item
    elif what == "truncate":
        entries.truncate(2)
    elif what == "clear":
        entries.clear()


def check(tables: TagCheck, batch: list[Pair], now: np.ndarray) -> None:
    assert fill(tables, batch) == [pages[:] for pages, _ in batch]
    wrong = set()
    for row, (pages, refs) in enumerate(batch):
        for entry in range(max(len(pages), len(refs))):
            page = pages[entry] if entry < len(pages) else None
            ref = refs[entry] if entry < len(refs) else None
            if page is None or ref is None or page != ref.page or int(now[page]) != ref.tag:
                wrong.add((row, entry))
    assert {(found.row, found.entry) for found in tables.check()} == wrong


def test_a_mismatch_says_what_is_where(caplog: pytest.LogCaptureFixture) -> None:
    pool = PagePool(PAGES)
    tables = TagCheck(pool, ROWS, WIDTH)
    batch = pairs(pool, 2, 2, 1)
    (a, a_refs), (b, b_refs), (c, _) = batch
    pool.release(b_refs[1:], "r1")
    (again,) = pool.allocate(1, "new")
    assert again.page == b[1]
    c.append(a[0])  # more than it was given
    a[1] = PAGES + 5
    fill(tables, batch)
    with caplog.at_level(logging.WARNING):
        found = tables.check()
    assert [tuple(one) for one in found] == [
        (0, 1, PAGES + 5, a_refs[1], 0, ()),
        (1, 1, b[1], b_refs[1], again.tag, ("new",)),
        (2, 1, a[0], (-1, 0), a_refs[0].tag, ("r0",)),
    ]
    assert (tables.num_checks, tables.num_mismatches, pool.audit.counts["step"]) == (1, 3, 3)
    assert [record.getMessage() for record in caplog.records][1] == (
        f"KV page {b[1]} with tag {again.tag} instead of page {b[1]} with tag {b_refs[1].tag} "
        "(step, reference of nobody, held by new)"
    )
    assert fill(tables, batch[:0]) == [] and tables.check() == []


def test_a_table_that_ends_early_is_a_mismatch(caplog: pytest.LogCaptureFixture) -> None:
    pool = PagePool(PAGES)
    tables = TagCheck(pool, ROWS, WIDTH)
    ((table, refs),) = pairs(pool, 2)
    assert fill(tables, [(table, refs)]) and tables.check() == []
    table.truncate(1)
    fill(tables, [(table, refs)])
    assert [tuple(one) for one in tables.check()] == [(0, 1, -1, refs[1], 0, ())]
    table.clear()
    fill(tables, [(table, refs)])
    assert len(tables.check()) == 2
    assert caplog.text.count("KV page -1") == 2 and "and 1 more" in caplog.text  # one line for a request


def test_a_page_that_is_none_is_a_mismatch() -> None:
    pool = PagePool(PAGES)
    tables = TagCheck(pool, ROWS, WIDTH)
    fill(tables, [(Entries([-1]), Entries())])
    assert [tuple(one) for one in tables.check()] == [(0, 0, -1, (-1, 0), 0, ())]


def test_the_table_used_longest_ago_makes_room() -> None:
    tables = BlockTables(2, WIDTH)
    a, b, c = (Entries([page]) for page in range(3))
    for one in (a, b, a, c):
        assert tables.fill([one], []).tolist() == [one[:]]
    assert [one.home is None for one in (a, b, c)] == [False, True, False]


@pytest.mark.parametrize("is_tagged", [True, False])
def test_the_same_tables_are_gathered_once(is_tagged: bool) -> None:
    pool = PagePool(PAGES, is_tagged=is_tagged)
    tables, other = block_tables(pool, ROWS, WIDTH), block_tables(pool, ROWS, WIDTH)
    batch = pairs(pool, 2, 1)
    pages, refs = [pages for pages, _ in batch], [refs for _, refs in batch]
    first = tables.fill(pages, refs)
    assert tables.fill(list(pages), list(refs)) is first and tables.counts.tolist() == [2, 1]
    for change in (
        lambda: pages[1].append(5),
        lambda: pages[0].truncate(1),
        lambda: pages[0].clear(),
        lambda: other.fill(pages, refs),  # takes the lists away
        pages.reverse,
    ):
        before = tables.fill(pages, refs)
        copy = before.copy()
        change()
        after = tables.fill(pages, refs)
        assert after is not before and (before == copy).all()
        assert [after[i, :n].tolist() for i, n in enumerate(map(len, pages))] == [list(p) for p in pages]
        assert tables.fill(pages, refs) is after


def test_a_page_that_is_freed_between_steps_of_one_table_is_seen() -> None:
    pool = PagePool(PAGES)
    tables = TagCheck(pool, ROWS, WIDTH)
    batch = pairs(pool, 2, 1)
    fill(tables, batch)
    assert tables.check() == []
    pool.release(batch[0][1][1:], "r0")
    fill(tables, batch)
    assert [(found.row, found.entry) for found in tables.check()] == [(0, 1)]


def test_tags_beyond_63_bits() -> None:
    pool = PagePool(2)
    pool._tagger._last = 2**64 - 3  # type: ignore[attr-defined]
    tables = TagCheck(pool, 1, 2)
    batch = pairs(pool, 2)
    assert [ref.tag for ref in batch[0][1]] == [2**64 - 2, 2**64 - 1]
    fill(tables, batch)
    assert tables.check() == []


def test_off_has_nothing_of_tags() -> None:
    pool = PagePool(PAGES, is_tagged=False)
    tables = block_tables(pool, ROWS, WIDTH)
    assert pool.tags is None and type(tables) is BlockTables
    assert {array.dtype for array in vars(tables).values() if isinstance(array, np.ndarray)} == {
        np.dtype(np.int32)
    }
    batch = pairs(pool, 2, 3)
    assert {ref.tag for _, refs in batch for ref in refs} == {0}
    assert fill(tables, batch) == [pages[:] for pages, _ in batch]
    batch[0][0][0] = 7
    assert fill(tables, batch)[0][0] == 7 and tables.check() == [] and tables.num_checks == 0
    with pytest.raises(ValueError, match="no tags"):
        TagCheck(pool, ROWS, WIDTH)


def test_on_is_the_check() -> None:
    assert type(block_tables(PagePool(1), 1, 1)) is TagCheck


@pytest.mark.parametrize("is_tagged", [True, False])
def test_what_does_not_fit_is_refused(is_tagged: bool) -> None:
    pool = PagePool(PAGES, is_tagged=is_tagged)
    tables = block_tables(pool, 1, 2)
    with pytest.raises(ValueError, match="2 sequences in a step, at most 1"):
        fill(tables, pairs(pool, 1, 1))
    with pytest.raises(ValueError, match="3 pages in a sequence, at most 2"):
        fill(tables, pairs(pool, 3))


def test_each_table_needs_what_is_expected() -> None:
    pool = PagePool(PAGES)
    with pytest.raises(ValueError, match="1 tables, but 0"):
        TagCheck(pool, 1, 1).fill([Entries([0])], [])
