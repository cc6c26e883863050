"""The books of a pool, checked page by page: for tests after every operation, and for whoever suspects a leak.

Plain loops over all pages; nothing calls this between steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from .page import IntegrityError, PageRef

if TYPE_CHECKING:
    from .pool import PagePool


def check_integrity(pool: PagePool, held: Mapping[str, Iterable[PageRef]] | None) -> None:
    """See ``PagePool.check_integrity``."""
    _check_states(pool)
    _check_owners(pool)
    pool._tagger.check_integrity()
    pool._keeper.check_integrity()
    if held is not None:
        _check_held(pool, held)


def _check_states(pool: PagePool) -> None:
    places = {
        "free": Counter(pool._free),
        "used": Counter(list(pool._owners)),
        "cached": Counter(list(pool._cached)),
        "in flight and held by nobody": Counter(pool._landing),
    }
    for page in range(pool.num_pages):
        found = [name for name, pages in places.items() for _ in range(pages[page])]
        if len(found) != 1:
            raise IntegrityError(f"page {page} is {' and '.join(found) or 'nowhere'}")
    outside = [page for pages in places.values() for page in pages if not 0 <= page < pool.num_pages]
    if outside:
        raise IntegrityError(f"page {outside[0]} is outside the pool of {pool.num_pages} pages")
    for page in pool._cached:
        if not pool._keeper.holds(page):
            raise IntegrityError(f"page {page} is cached, but the prefix index has no entry for it")
        if pool.is_in_flight(page):
            raise IntegrityError(f"page {page} may be evicted, but is in flight")
    for page in pool._free:
        if pool._keeper.holds(page):
            raise IntegrityError(f"page {page} is free, but the prefix index has an entry for it")
    for page in pool._landing:
        if not pool.is_in_flight(page):
            raise IntegrityError(f"page {page} waits for a step that has landed")


def _check_owners(pool: PagePool) -> None:
    for page, names in pool._owners.items():
        if not names:
            raise IntegrityError(f"page {page} is used, but nobody holds it")
        if len(set(names)) != len(names):
            raise IntegrityError(f"page {page} is held twice by one owner: {names}")


def _check_held(pool: PagePool, held: Mapping[str, Iterable[PageRef]]) -> None:
    believed: Counter[tuple[int, str]] = Counter()
    for owner, refs in held.items():
        for ref in refs:
            believed[ref.page, owner] += 1
            if not pool.matches(ref):
                raise IntegrityError(
                    f"page {ref.page}: {owner!r} expects tag {ref.tag}, it has {pool._tagger.now(ref.page)}"
                )
    booked = Counter((page, name) for page, names in pool._owners.items() for name in names)
    for (page, owner), count in (believed - booked).items():
        raise IntegrityError(f"page {page}: {owner!r} believes to hold it {count} times more than it does")
    for page, owner in booked - believed:
        raise IntegrityError(f"page {page} is held by {owner!r}, who knows nothing of it")
