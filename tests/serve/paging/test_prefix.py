"""The prefix index: whole pages, own salts, compared tokens, least recently used leaves first."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import pytest

from quantkit_serve.paging import PagePool, PageRef, PrefixIndex

SIZE = 2


@pytest.fixture
def pool() -> PagePool:
    return PagePool(6)


@pytest.fixture
def index(pool: PagePool) -> PrefixIndex:
    return PrefixIndex(pool, SIZE)


def enter(
    pool: PagePool, index: PrefixIndex, prompt: Sequence[int], salt: str = "", owner: str = "a"
) -> list[PageRef]:
    refs = pool.allocate(-(-len(prompt) // SIZE), owner)
    assert len(index.insert(prompt, salt, refs)) == len(prompt) // SIZE
    return refs


def test_the_longest_chain_of_whole_pages(pool: PagePool, index: PrefixIndex) -> None:
    refs = enter(pool, index, [1, 2, 3, 4, 5])
    assert index.match([1, 2, 3, 4, 5]) == refs[:2]  # the third is not full
    assert index.match([1, 2, 3, 4]) == refs[:2]
    assert index.match([1, 2, 3]) == refs[:1]
    assert index.match([1, 2, 9, 4]) == refs[:1]
    assert index.match([9, 2, 3, 4]) == [] == index.match([3, 4]) == index.match([1]) == index.match([])
    assert pool.counts() == (3, 3, 0, 0)  # a match holds nothing
    pool.release(refs, "a")
    assert pool.counts() == (4, 0, 2, 0)
    pool.check_integrity({})


def test_tokens_behind_a_page_belong_to_it(pool: PagePool) -> None:
    index = PrefixIndex(pool, SIZE, lookahead=1)
    refs = pool.allocate(2, "a")
    assert index.insert([1, 2, 3, 4], "", refs) == refs[:1]  # nothing is behind the second page
    assert index.match([1, 2, 3]) == index.match([1, 2, 3, 4, 5]) == refs[:1]
    assert index.match([1, 2]) == [] == index.match([1, 2, 4])
    assert index.insert([1, 2, 3, 4, 5], "", refs) == refs
    assert index.match([1, 2, 3, 4, 5]) == refs
    assert index.match([1, 2, 3, 4, 6]) == refs[:1]
    others = pool.allocate(2, "b")
    assert index.insert([1, 2, 3, 4, 6], "", others) == [refs[0], others[1]]
    assert index.insert([1, 2], "", others) == index.insert([], "", []) == []
    pool.check_integrity({"a": refs, "b": others})


def test_digests_are_a_chain_of_blake2b(pool: PagePool, index: PrefixIndex) -> None:
    enter(pool, index, [1, 2, 3, 4], salt="tenant")
    digest = blake2b(b"tenant", digest_size=32).digest()
    for tokens in ([1, 2], [3, 4]):
        content = b"".join(token.to_bytes(4, "little") for token in tokens)
        digest = blake2b(content, digest_size=32, key=digest).digest()
        assert digest in index._nodes


def test_salts_never_meet(pool: PagePool, index: PrefixIndex) -> None:
    one = enter(pool, index, [1, 2, 3, 4], salt="x")
    assert index.match([1, 2, 3, 4], "y") == [] == index.match([1, 2, 3, 4])
    other = enter(pool, index, [1, 2, 3, 4], salt="y", owner="b")
    assert index.match([1, 2, 3, 4], "x") == one and index.match([1, 2, 3, 4], "y") == other


def test_the_first_writer_wins(pool: PagePool, index: PrefixIndex) -> None:
    one = enter(pool, index, [1, 2, 3, 4])
    other = pool.allocate(3, "b")
    assert index.insert([1, 2, 3, 4, 5, 6], "", other) == [*one, other[2]]
    assert index.match([1, 2, 3, 4, 5, 6]) == [*one, other[2]]
    pool.release(other, "b")
    assert pool.counts() == (3, 2, 1, 0)  # b's copies of the first two are free
    pool.check_integrity({"a": one})


def test_only_as_many_pages_as_there_are(pool: PagePool, index: PrefixIndex) -> None:
    refs = pool.allocate(1, "a")
    assert index.insert([1, 2, 3, 4], "", refs) == refs and len(index) == 1


def test_the_same_page_twice(pool: PagePool, index: PrefixIndex) -> None:
    refs = pool.allocate(1, "a")
    with pytest.raises(ValueError, match="twice"):
        index.insert([1, 2, 3, 4], "", refs * 2)


def test_a_page_that_is_nobodys_does_not_enter(pool: PagePool, index: PrefixIndex) -> None:
    refs = pool.allocate(2, "a")
    pool.release(refs[1:], "a")
    assert index.insert([1, 2, 3, 4], "", refs) == refs
    assert index.match([1, 2, 3, 4]) == refs[:1]
    assert pool.audit.counts["prefix"] == 1


def test_leaves_go_first_then_least_recently_given_back(pool: PagePool, index: PrefixIndex) -> None:
    one = enter(pool, index, [1, 1, 2, 2], owner="a")
    other = enter(pool, index, [3, 3, 4, 4], owner="b")
    pool.release(other, "b")
    pool.release(one, "a")
    pool.share(index.match([3, 3]), "c")  # used again: the first of b's pages is younger than a's now
    pool.release(other[:1], "c")
    order = []
    for number in range(1, 5):
        pool.allocate(3 if number == 1 else 1, "hog")
        order += [ref for ref in [*one, *other] if not pool.is_live(ref) and ref not in order]
        pool.check_integrity()
    assert order == [other[1], one[1], one[0], other[0]]
    assert index.num_evictions == 4 and len(index) == 0


def test_a_cached_leaf_goes_before_its_older_parent(pool: PagePool, index: PrefixIndex) -> None:
    one = enter(pool, index, [1, 1])
    other = pool.allocate(2, "b")
    assert index.insert([1, 1, 2, 2], "", other) == [one[0], other[1]]
    pool.release(one, "a")  # the parent is given back first
    pool.release(other, "b")
    assert pool.counts() == (4, 0, 2, 0)
    pool.allocate(5, "hog")
    assert index.match([1, 1, 2, 2]) == one


def test_a_parent_whose_child_is_used_can_go(pool: PagePool, index: PrefixIndex) -> None:
    """Else pages that count as available could not be had."""
    one = enter(pool, index, [1, 1])
    other = pool.allocate(2, "b")
    index.insert([1, 1, 2, 2], "", other)
    pool.release(one, "a")
    assert pool.available() == 4
    pool.allocate(4, "hog")
    assert index.match([1, 1, 2, 2]) == [] and len(index) == 0
    pool.check_integrity()
    pool.release(other, "b")
    assert pool.counts() == (2, 4, 0, 0)  # nothing keeps the child


def test_a_child_in_flight_goes_with_its_parent_into_quarantine(pool: PagePool, index: PrefixIndex) -> None:
    one = enter(pool, index, [1, 1])
    other = pool.allocate(2, "b")
    index.insert([1, 1, 2, 2], "", other)
    pool.release(one, "a")
    ticket = pool.launch([other[1].page])
    pool.release(other, "b")
    assert pool.counts() == (4, 0, 2, 0)
    pool.allocate(5, "hog")
    assert pool.counts() == (0, 5, 0, 1) and not pool.matches(other[1])
    pool.check_integrity()
    pool.landed(ticket)
    assert pool.counts() == (1, 5, 0, 0)


def constant(parent: bytes, content: bytes) -> bytes:
    return b"same"


def last_only(parent: bytes, content: bytes) -> bytes:
    """Forgets what came before; salts are all alike."""
    return content if parent else b"root"


def test_collisions_are_misses(pool: PagePool) -> None:
    index = PrefixIndex(pool, SIZE, digest=constant)
    refs = enter(pool, index, [1, 2, 3, 4])
    assert index.match([1, 2, 3, 4]) == refs[:1]
    assert index.match([5, 6]) == [] and index.match([1, 2], "other salt") == []
    other = enter(pool, index, [5, 6], owner="b")
    assert index.match([5, 6]) == []
    assert index.num_collisions == 6  # in two inserts and four matches
    pool.release(refs, "a")
    pool.release(other, "b")
    assert pool.counts() == (5, 0, 1, 0)
    pool.check_integrity({})


def test_the_parent_and_the_salt_are_compared_too(pool: PagePool) -> None:
    index = PrefixIndex(pool, SIZE, digest=last_only)
    refs = enter(pool, index, [1, 2, 3, 4])
    enter(pool, index, [5, 6], owner="b")
    assert index.match([1, 2, 3, 4]) == refs
    assert len(index.match([5, 6, 3, 4])) == 1  # its [3, 4] came after something else
    assert index.match([3, 4]) == []
    assert index.match([1, 2, 3, 4], "salt") == []
