"""The page pool: who holds which page, and when it may be given to somebody else.

Every page is exactly one of

- free,
- used: at least one owner holds it; an owner holds a page once, however many tables it is in,
- cached: nobody holds it but the prefix index has an entry for it; evicted when pages run out,
- quarantined: given back while a step that was launched may still read or write it.

Owners are kept by name, not as a count: a reference that its owner does not have can't be given back, and the
live page shows whose a page is. Pages in flight are told by whole steps (``launch``, ``landed``) and looked at
only when one of them is given back meanwhile, since noting 64 x 256 pages one by one would cost more than the
step's tag check.

Left out: the bytes, and any lock: one thread calls.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .audit import Audit, Finding, Where
from .integrity import check_integrity
from .page import IntegrityError, NoTags, OutOfPages, PageRef, PageTags, StalePage, Tagger


class PoolCounts(NamedTuple):
    """Pages by state; they add up to the pool."""

    free: int
    used: int
    cached: int
    quarantined: int


class Keeper(Protocol):
    """What keeps pages that nobody holds: the prefix index."""

    def holds(self, page: int) -> bool:
        """Whether it has an entry for the page as it is now."""

    def evict(self, page: int) -> None:
        """Give up the cached page, or cached ones that hang on it; tells ``PagePool.forget``."""

    def check_integrity(self) -> None:
        """Raises IntegrityError."""


class _KeepsNothing:
    def holds(self, page: int) -> bool:
        return False

    def evict(self, page: int) -> None:
        raise IntegrityError(f"page {page} is cached, but there is no prefix index")

    def check_integrity(self) -> None:
        return None


class _Flight(NamedTuple):
    """A step that is under way; see ``PagePool.launch``."""

    pages: NDArray[np.int32]
    counts: NDArray[np.int32] | None

    def touched(self) -> NDArray[np.int32]:
        if self.counts is None:
            return self.pages
        return np.asarray(self.pages[np.arange(self.pages.shape[1]) < self.counts[:, None]])


class PagePool:
    """Pages 0 to ``num_pages`` - 1.

    Args:
        num_pages: at least 1.
        is_tagged: whether pages carry tags.

    Attributes:
        tags: uint64 ``[num_pages]``, the tags now; None when off.
        audit: references that did not fit.

    Raises:
        ValueError: no pages.
    """

    def __init__(self, num_pages: int, *, is_tagged: bool = True) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {num_pages}")
        self.num_pages = num_pages
        self.audit = Audit()
        self._tagger: Tagger = PageTags(num_pages) if is_tagged else NoTags()
        self._free = list(range(num_pages - 1, -1, -1))  # the last one is next
        self._owners: dict[int, list[str]] = {}  # of used pages only
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently given back first; none is in flight
        self._landing: set[int] = set()  # held by nobody, in flight: quarantined, or cached but not to be evicted
        self._flights: dict[int, _Flight] = {}  # by ticket
        self._in_flight: NDArray[np.bool_] | None = None  # bool [num_pages], of all flights; None: not known yet
        self._last_ticket = 0
        self._keeper: Keeper = _KeepsNothing()

    @property
    def tags(self) -> NDArray[np.uint64] | None:
        return self._tagger.tags

    def attach(self, keeper: Keeper) -> None:
        """Pages with an entry in ``keeper`` are cached when nobody holds them any more."""
        self._keeper = keeper

    # -- holding pages

    def allocate(self, count: int, owner: str) -> list[PageRef]:
        """``count`` pages for ``owner``, each with a new tag; evicts cached pages if need be.

        Raises:
            OutOfPages: there aren't as many; nothing is given or evicted.
        """
        if count > self.available():
            raise OutOfPages(count, self.available())
        while len(self._free) < count:
            before = len(self._free)
            self._keeper.evict(next(iter(self._cached)))
            if len(self._free) == before:
                raise IntegrityError(f"page {next(iter(self._cached))} is cached and can't be evicted")
        refs = []
        for _ in range(count):
            page = self._free.pop()
            self._owners[page] = [owner]
            refs.append(PageRef(page, self._tagger.draw(page)))
        return refs

    def share(self, refs: Sequence[PageRef], owner: str) -> None:
        """``owner`` holds these pages too, all of them or none.

        Raises:
            StalePage: one of them has been freed since.
            ValueError: the owner holds one of them already.
        """
        for ref in refs:
            if not self.is_live(ref):
                raise StalePage(ref, self._tagger.now(ref.page))
            if owner in self._owners.get(ref.page, ()):
                raise ValueError(f"{owner!r} holds page {ref.page} already")
        if len({ref.page for ref in refs}) != len(refs):
            raise ValueError(f"{owner!r} asks for a page twice: {[ref.page for ref in refs]}")
        for ref in refs:
            self._cached.pop(ref.page, None)
            self._landing.discard(ref.page)
            self._owners.setdefault(ref.page, []).append(owner)

    def release(self, refs: Sequence[PageRef], owner: str) -> list[PageRef]:
        """``owner`` gives these pages back.

        A page that it no longer holds, by tag or by name, belongs to somebody else by now: it is left alone and
        recorded in ``audit``.

        Returns:
            Those left alone, in the order of ``refs``.
        """
        left = []
        for ref in reversed(refs):  # the end of a prefix is evicted before its beginning
            holders = self._owners.get(ref.page, [])
            if not self._tagger.matches(ref) or owner not in holders:
                left.append(ref)
                continue
            holders.remove(owner)
            if not holders:
                del self._owners[ref.page]
                self._vacate(ref.page)
        left.reverse()
        self.record("release", left, owner)
        return left

    def forget(self, ref: PageRef) -> None:
        """The prefix index has no entry for this page any more."""
        page = ref.page
        if not self._tagger.matches(ref):
            return  # freed behind the index's back; it is somebody else's now
        if page in self._cached:
            del self._cached[page]
            self._vacate(page)
        elif page in self._landing:
            self._tagger.draw(page)

    def _vacate(self, page: int) -> None:
        """Nobody holds the page any more."""
        is_kept = self._keeper.holds(page)
        if not is_kept:
            self._tagger.draw(page)
        if self.is_in_flight(page):
            self._landing.add(page)
        else:
            self._settle(page, is_kept)

    def _settle(self, page: int, is_kept: bool) -> None:
        if is_kept:
            self._cached[page] = None
        else:
            self._free.append(page)

    # -- pages in flight

    def launch(self, pages: NDArray[np.int32] | Sequence[int], counts: NDArray[np.int32] | None = None) -> int:
        """A step that reads or writes these pages begins; none of them is free before it has landed.

        Args:
            pages: of any shape, all of them held by somebody: a cached page in flight could not be evicted. What
                is outside the pool is passed over.
            counts: int32 ``[R]``, of pages ``[R, P]``: so many of each row. What follows them may be pages of
                others; those must not count as in flight, or a step launched meanwhile could not evict them.

        Returns:
            The ticket to land with.
        """
        self._last_ticket += 1
        self._flights[self._last_ticket] = _Flight(np.array(pages, np.int32), counts)
        self._in_flight = None
        return self._last_ticket

    def landed(self, ticket: int) -> None:
        """That step no longer reads or writes anything.

        Raises:
            ValueError: no such step is in flight.
        """
        if self._flights.pop(ticket, None) is None:
            raise ValueError(f"no step with ticket {ticket} is in flight")
        self._in_flight = None
        for page in [page for page in self._landing if not self.is_in_flight(page)]:
            self._landing.remove(page)
            self._settle(page, self._keeper.holds(page))

    def is_in_flight(self, page: int) -> bool:
        """Whether a step that was launched may touch the page."""
        if self._in_flight is None:
            self._in_flight = np.zeros(self.num_pages, np.bool_)
            for flight in self._flights.values():
                pages = flight.touched()
                self._in_flight[pages[(pages >= 0) & (pages < self.num_pages)]] = True
        return bool(self._in_flight[page])

    # -- questions

    def matches(self, ref: PageRef) -> bool:
        """Whether the tag is still the page's; always, with tags off."""
        return self._tagger.matches(ref)

    def is_live(self, ref: PageRef) -> bool:
        """Whether the page's content is still that of ``ref``: used or cached, with this tag."""
        page = ref.page
        if not self._tagger.matches(ref):
            return False
        return page in self._owners or page in self._cached or (page in self._landing and self._keeper.holds(page))

    def is_cached(self, page: int) -> bool:
        """Whether the page could be evicted."""
        return page in self._cached

    def stale(self, refs: Iterable[PageRef], owner: str) -> list[PageRef]:
        """The hand-off's check: those whose tag is no longer their page's, recorded in ``audit``."""
        found = [ref for ref in refs if not self._tagger.matches(ref)]
        self.record("hand-off", found, owner)
        return found

    def available(self) -> int:
        """Pages that ``allocate`` can give: free, or cached and not in flight."""
        return len(self._free) + len(self._cached)

    def counts(self) -> PoolCounts:
        kept = sum(map(self._keeper.holds, self._landing))
        return PoolCounts(len(self._free), len(self._owners), len(self._cached) + kept, len(self._landing) - kept)

    def owners(self, page: int) -> tuple[str, ...]:
        """Who holds the page."""
        return tuple(self._owners.get(page, ()))

    def page_map(self) -> dict[int, str]:
        """Page -> its owner, ``shared``, ``cached`` or ``quarantined``; free pages are left out."""
        found = {page: names[0] if len(names) == 1 else "shared" for page, names in self._owners.items()}
        found.update(dict.fromkeys(self._cached, "cached"))
        found.update({p: "cached" if self._keeper.holds(p) else "quarantined" for p in self._landing})
        return found

    def record(self, where: Where, refs: Sequence[PageRef], owner: str = "") -> None:
        """Note in ``audit`` that these pages are not what ``refs`` say."""
        self.audit.record(
            [Finding(where, r.page, r, self._tagger.now(r.page), owner, self.owners(r.page)) for r in refs]
        )

    def check_integrity(self, held: Mapping[str, Iterable[PageRef]] | None = None) -> None:
        """Every page is in exactly one state, tags are unique, the index's entries are used or cached pages.

        Args:
            held: what each owner believes to hold; compared with the pool's books.

        Raises:
            IntegrityError: names the page.
        """
        check_integrity(self, held)
