"""Injected faults, for tests: each breaks the pool, an index entry or a block table in one way that has been seen.

``quantkit serve --inject-fault NAME`` strikes once, at the first step at which there is something to break. A fault
never touches what a sequence expects: that is what finds it.

| name | effect | met by | with tags off |
|---|---|---|---|
| free-early | a page that a running request holds is freed | the check before its next step: a freed page has a new tag | another request gets the page; both write, one reads the other's content |
| double-allocate | a page in use is on the free list as well, so another request gets it too | the same check: the second allocation drew a new tag | the same |
| remap | an entry of a request's block table names another request's page | the same check: the page differs | the request reads the other one's content |
| stale-prefix | a cached page is freed, its entry in the prefix index stays | the tag in the entry, when it is hit | a prompt gets the content of whoever has the page now |
| late-write | a step goes on writing to a page after its request has ended | the quarantine of pages in flight: nobody has the page yet | the same: no tag is involved. Without the quarantine another request's content is overwritten, which only the canary of a hand-off sees |
"""  # noqa: E501  (a table)

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from .entries import Entries
from .page import PageRef
from .pool import PagePool


class Victim(NamedTuple):
    """A running sequence; ``owner`` as the pool knows it."""

    owner: str
    table: Entries[int]
    expected: Entries[PageRef]


@dataclass(frozen=True)
class Scene:
    """What there is to break before a step.

    Attributes:
        pool: of the pages.
        victims: sequences of the step that is about to be checked.
        scribble: overwrites a page's bytes in every layer.
    """

    pool: PagePool
    victims: Sequence[Victim]
    scribble: Callable[[int], None]


class Fault(Protocol):
    def strike(self, scene: Scene) -> str | None:
        """Break something and say what; None if there is nothing to break yet. Called until it has struck."""


class FreeEarly:
    """The last page of a victim that holds it alone goes back to the pool."""

    def strike(self, scene: Scene) -> str | None:
        victim = _sole_holder(scene)
        if victim is None:
            return None
        page = victim.expected[-1].page
        del scene.pool._owners[page]
        scene.pool._vacate(page)
        return f"page {page} of {victim.owner} freed"


class DoubleAllocate:
    """The last page of a victim that holds it alone is given to the next one who asks."""

    def strike(self, scene: Scene) -> str | None:
        victim = _sole_holder(scene)
        if victim is None:
            return None
        page = victim.expected[-1].page
        scene.pool._free.append(page)
        return f"page {page} of {victim.owner} will be given out again"


class Remap:
    """An entry of a victim's table becomes that of another one: the first that they don't share."""

    def strike(self, scene: Scene) -> str | None:
        for victim in scene.victims:
            for other in scene.victims:
                for entry, (former, page) in enumerate(zip(victim.table, other.table, strict=False)):
                    if former != page:
                        victim.table[entry] = page
                        return f"entry {entry} of {victim.owner}: page {former} became {page}, of {other.owner}"
        return None


class StalePrefix:
    """The cached page that was given back last, the first of its prompt, is freed; the index isn't told."""

    def strike(self, scene: Scene) -> str | None:
        pool = scene.pool
        if not pool._cached:
            return None
        page, _ = pool._cached.popitem()
        pool._tagger.draw(page)
        pool._free.append(page)
        return f"cached page {page} freed, its entry in the prefix index is left"


class LateWrite:
    """A step that never lands holds a victim's last page, and writes to it when the victim has ended.

    Args:
        has_quarantine: whether the pool knows that the step is in flight.
    """

    def __init__(self, *, has_quarantine: bool = True) -> None:
        self._has_quarantine = has_quarantine
        self._target: Victim | None = None
        self._page = self._ticket = 0

    def strike(self, scene: Scene) -> str | None:
        if self._target is None:
            self._target = _sole_holder(scene)
            if self._target is not None:
                self._page = self._target.expected[-1].page
                self._ticket = scene.pool.launch([self._page] if self._has_quarantine else [])
            return None
        if self._target.owner in scene.pool.owners(self._page):
            return None
        holders = scene.pool.owners(self._page)
        scene.scribble(self._page)
        scene.pool.landed(self._ticket)
        return (
            f"page {self._page} written for {self._target.owner}, which has ended; "
            f"held by {', '.join(holders) or 'nobody'}"
        )


FAULTS: Mapping[str, Callable[[], Fault]] = {
    "free-early": FreeEarly,
    "double-allocate": DoubleAllocate,
    "remap": Remap,
    "stale-prefix": StalePrefix,
    "late-write": LateWrite,
}


def _sole_holder(scene: Scene) -> Victim | None:
    """A victim whose last page is nobody else's, and not in the prefix index."""
    for victim in scene.victims:
        if not len(victim.expected):
            continue
        page = victim.expected[-1].page
        if scene.pool.owners(page) == (victim.owner,) and not scene.pool._keeper.holds(page):
            return victim
    return None
