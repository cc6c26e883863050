"""The pool: states, references, quarantine, and books that contradict each other."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest

from quantkit_serve.paging import IntegrityError, OutOfPages, PagePool, PageRef, PrefixIndex, StalePage

SIZE = 2


def with_cached(pool: PagePool, prompt: list[int], owner: str = "a") -> list[PageRef]:
    """A prompt whose pages are cached."""
    index = pool._keeper if isinstance(pool._keeper, PrefixIndex) else PrefixIndex(pool, SIZE)
    refs = pool.allocate(len(prompt) // SIZE, owner)
    index.insert(prompt, "", refs)
    pool.release(refs, owner)
    return refs


def test_every_allocation_and_every_free_draws_a_tag() -> None:
    pool = PagePool(3)
    assert pool.tags is not None and pool.tags.tolist() == [1, 2, 3]
    refs = pool.allocate(2, "a")
    assert refs == [(0, 4), (1, 5)]
    pool.share(refs[:1], "b")
    assert pool.release(refs[:1], "a") == [] and pool.tags[0] == 4  # b has it still
    pool.release(refs[:1], "b")
    assert pool.tags.tolist() == [6, 5, 3]
    assert not pool.matches(refs[0]) and pool.matches(refs[1])
    assert pool.allocate(1, "c") == [(0, 7)]
    pool.check_integrity({"a": refs[1:], "c": [PageRef(0, 7)]})


def test_all_or_nothing() -> None:
    pool = PagePool(4)
    with_cached(pool, [1, 1, 2, 2])
    pool.allocate(1, "b")
    with pytest.raises(OutOfPages, match="4 pages wanted, 3 available"):
        pool.allocate(4, "c")
    assert pool.counts() == (1, 1, 2, 0)
    assert len(pool.allocate(3, "c")) == 3
    assert pool.allocate(0, "d") == []


def test_what_is_not_ones_own_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    pool = PagePool(2)
    a, b = pool.allocate(1, "a"), pool.allocate(1, "b")
    with caplog.at_level(logging.WARNING):
        assert pool.release([*a, *b], "a") == b
    assert pool.audit.findings[-1] == ("release", b[0].page, b[0], b[0].tag, "a", ("b",))
    assert "release, reference of a, held by b" in caplog.text
    assert pool.release(a, "a") == a  # twice
    assert pool.audit.counts["release"] == 2
    pool.check_integrity({"b": b})


def test_a_reference_from_before_is_not_ones_own() -> None:
    """The page went away and came back to the same owner: the name fits, the tag doesn't."""
    pool = PagePool(1)
    before = pool.allocate(1, "a")
    pool.release(before, "a")
    now = pool.allocate(1, "a")
    assert pool.release([*now, *before], "a") == before
    assert pool.counts().free == 1
    pool.check_integrity({})


def test_sharing_is_refused_as_a_whole() -> None:
    pool = PagePool(3)
    kept, gone = pool.allocate(1, "a"), pool.allocate(1, "a")
    pool.release(gone, "a")
    with pytest.raises(StalePage, match=f"page {gone[0].page} has tag 6, not {gone[0].tag}"):
        pool.share([*kept, *gone], "b")
    with pytest.raises(ValueError, match="'a' holds page 0 already"):
        pool.share(kept, "a")
    with pytest.raises(ValueError, match="twice"):
        pool.share(kept * 2, "b")
    assert pool.owners(kept[0].page) == ("a",)
    pool.check_integrity({"a": kept})


def test_sharing_a_free_page_is_refused_without_tags_too() -> None:
    pool = PagePool(1, is_tagged=False)
    refs = pool.allocate(1, "a")
    pool.release(refs, "a")
    with pytest.raises(StalePage):
        pool.share(refs, "b")


def test_a_page_in_flight_is_not_given_out_before_every_step_has_landed() -> None:
    pool = PagePool(2)
    (ref,) = refs = pool.allocate(1, "a")
    first, second = pool.launch([ref.page]), pool.launch(np.array([[ref.page, 77], [-1, ref.page]], np.int32))
    pool.release(refs, "a")
    assert not pool.matches(ref) and pool.counts() == (1, 0, 0, 1)
    assert pool.page_map() == {ref.page: "quarantined"}
    pool.landed(first)
    assert pool.available() == 1 and pool.is_in_flight(ref.page)
    with pytest.raises(OutOfPages):
        pool.allocate(2, "b")
    pool.landed(second)
    assert pool.counts() == (2, 0, 0, 0)
    with pytest.raises(ValueError, match=f"ticket {second}"):
        pool.landed(second)


def test_a_launched_table_may_be_overwritten() -> None:
    pool = PagePool(2)
    refs = pool.allocate(1, "a")
    table = np.array([[refs[0].page]], np.int32)
    ticket = pool.launch(table)
    table[:] = 1
    pool.release(refs, "a")
    assert pool.counts().quarantined == 1
    pool.landed(ticket)
    assert pool.counts().free == 2


def test_a_cached_page_in_flight_is_found_but_not_evicted() -> None:
    pool = PagePool(2)
    index = PrefixIndex(pool, SIZE)
    refs = pool.allocate(1, "a")
    index.insert([1, 1], "", refs)
    ticket = pool.launch([refs[0].page])
    pool.release(refs, "a")
    assert pool.counts() == (1, 0, 1, 0) and pool.available() == 1
    assert pool.page_map() == {refs[0].page: "cached"}
    pool.share(index.match([1, 1]), "b")
    assert pool.counts() == (1, 1, 0, 0)
    pool.release(refs, "b")
    pool.landed(ticket)
    assert pool.counts() == (1, 0, 1, 0) and pool.available() == 2
    pool.check_integrity({})


def test_whose_pages_are() -> None:
    pool = PagePool(5)
    (cached,) = with_cached(pool, [1, 1])
    a = pool.allocate(2, "a")
    pool.share(a[:1], "b")
    assert pool.page_map() == {cached.page: "cached", a[0].page: "shared", a[1].page: "a"}
    assert pool.owners(a[0].page) == ("a", "b")


def test_what_is_handed_off_is_checked() -> None:
    pool = PagePool(2)
    refs = pool.allocate(2, "a")
    assert pool.stale(refs, "a") == []
    pool.release(refs[1:], "a")
    assert pool.stale(refs, "a") == refs[1:]
    assert pool.audit.findings[-1].where == "hand-off"


def test_no_pages() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        PagePool(0)


def _tag_of_another(pool: PagePool) -> None:
    assert pool.tags is not None
    pool.tags[0] = pool.tags[1]


def _tag_never_drawn(pool: PagePool) -> None:
    assert pool.tags is not None
    pool.tags[5] = 2**63


def _tag_zero(pool: PagePool) -> None:
    assert pool.tags is not None
    pool.tags[5] = 0


def _index_node(pool: PagePool, page: int) -> PrefixIndex:
    assert isinstance(pool._keeper, PrefixIndex)
    assert page in pool._keeper._of_page
    return pool._keeper


def _unreachable(pool: PagePool) -> None:
    index = _index_node(pool, 2)
    del index._nodes[index._of_page.pop(2).digest]


def _unknown_to_parent(pool: PagePool) -> None:
    _index_node(pool, 2)._of_page[2].children.clear()


def _no_page_of_its_own(pool: PagePool) -> None:
    index = _index_node(pool, 3)
    index._of_page[3] = index._of_page[2]


@pytest.mark.parametrize(
    ("breaks", "text"),
    [  # pages 0 and 1 are used by a, 1 by b too; 2 and 3 are cached; 4 is quarantined; 5 is free
        (lambda pool: pool._free.append(0), "page 0 is free and used"),
        (lambda pool: pool._free.append(5), "page 5 is free and free"),
        (lambda pool: pool._free.clear(), "page 5 is nowhere"),
        (lambda pool: pool._free.append(9), "page 9 is outside"),
        (lambda pool: pool._cached.update({5: None}), "page 5 is free and cached"),
        (lambda pool: (pool._free.clear(), pool._cached.update({5: None})), "page 5 is cached, but the prefix"),
        (lambda pool: (pool._cached.pop(3), pool._free.append(3)), "page 3 is free, but the prefix index"),
        (lambda pool: pool.launch([3]), "page 3 may be evicted, but is in flight"),
        (lambda pool: pool._flights.clear(), "page 4 waits for a step"),
        (lambda pool: pool._owners[0].clear(), "page 0 is used, but nobody"),
        (lambda pool: pool._owners[0].append("a"), "page 0 is held twice"),
        (lambda pool: pool._owners[0].append("c"), "page 0 is held by 'c', who knows nothing"),
        (lambda pool: pool._owners[1].remove("a"), "page 1: 'a' believes to hold it 1 times more"),
        (_tag_of_another, r"pages \[0, 1\] carry the same tag"),
        (_tag_never_drawn, "page 5 carries tag 9223372036854775808"),
        (_tag_zero, "page 5 carries tag 0"),
        (lambda pool: pool._tagger.draw(0), "page 0: 'a' expects tag"),
        (_unreachable, "page 3: its entry can't be reached|page 2 is cached"),
        (_unknown_to_parent, "page 3: its entry is unknown"),
        (_no_page_of_its_own, "page 3 .*two entries"),
        (lambda pool: pool._tagger.draw(3), "page 3 is cached, but the prefix index"),
    ],
)
def test_books_that_contradict_each_other(breaks: Callable[[PagePool], object], text: str) -> None:
    pool = PagePool(6)
    a = pool.allocate(2, "a")
    pool.share(a[1:], "b")
    assert [ref.page for ref in with_cached(pool, [1, 1, 2, 2], "c")] == [2, 3]
    d = pool.allocate(1, "d")
    pool.launch([4])
    pool.release(d, "d")
    held = {"a": a, "b": a[1:]}
    pool.check_integrity(held)
    breaks(pool)
    pool._in_flight = None
    with pytest.raises(IntegrityError, match=text):
        pool.check_integrity(held)
