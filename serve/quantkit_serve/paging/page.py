"""A page as its holder knows it, its tag, and what can be wrong with it.

A page's tag is the value of one 64-bit counter of the whole pool, drawn at every allocation and at every free
and never reset. So two pages never carry the same tag, a tag never comes back, and a reference to a page fails
from the moment the page is freed, not only once it has been given to somebody else. (A counter per page would
let a wrong page pass whose count happens to agree.)

Off is another class, not a flag: no array, and nothing to branch on.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class PageRef(NamedTuple):
    """A page and the tag that it had when it was given out; the tag is 0 where tags are off."""

    page: int
    tag: int


class OutOfPages(Exception):
    """Fewer pages can be had than were asked for; nothing was given."""

    def __init__(self, wanted: int, available: int) -> None:
        super().__init__(f"{wanted} pages wanted, {available} available")
        self.wanted, self.available = wanted, available


class StalePage(ValueError):
    """A reference whose page has been freed, or given to somebody else, since."""

    def __init__(self, ref: PageRef, found_tag: int) -> None:
        super().__init__(f"page {ref.page} has tag {found_tag}, not {ref.tag}")
        self.ref, self.found_tag = ref, found_tag


class IntegrityError(Exception):
    """The books of the pool contradict each other: a bug, or an injected fault."""


class Tagger(Protocol):
    """Gives out tags and compares them."""

    tags: NDArray[np.uint64] | None

    def draw(self, page: int) -> int:
        """The page's new tag."""

    def now(self, page: int) -> int:
        """The page's tag."""

    def matches(self, ref: PageRef) -> bool:
        """Whether the page is still the one that was given out."""

    def check_integrity(self) -> None:
        """Raises IntegrityError unless all tags differ and have been drawn."""


class PageTags:
    """Tags on: uint64 ``[N]``, of every page, free ones too; 0 is never drawn."""

    def __init__(self, num_pages: int) -> None:
        self.tags: NDArray[np.uint64] | None = np.arange(1, num_pages + 1, dtype=np.uint64)
        self._array = self.tags
        self._item = self.tags.item
        self._last = num_pages

    def draw(self, page: int) -> int:
        self._last += 1
        self._array[page] = self._last
        return self._last

    def now(self, page: int) -> int:
        return self._item(page)

    def matches(self, ref: PageRef) -> bool:
        return self._item(ref.page) == ref.tag

    def check_integrity(self) -> None:
        tags = self._array
        values, counts = np.unique(tags, return_counts=True)
        if (counts > 1).any():
            twice = int(values[counts > 1][0])
            pages = np.flatnonzero(tags == twice).tolist()
            raise IntegrityError(f"pages {pages} carry the same tag {twice}")
        if int(values[0]) == 0 or int(values[-1]) > self._last:
            page = int(tags.argmin() if values[0] == 0 else tags.argmax())
            raise IntegrityError(f"page {page} carries tag {int(tags[page])}, which was never drawn")


class NoTags:
    """Tags off."""

    tags: NDArray[np.uint64] | None = None

    def draw(self, page: int) -> int:
        return 0

    def now(self, page: int) -> int:
        return 0

    def matches(self, ref: PageRef) -> bool:
        return True

    def check_integrity(self) -> None:
        return None
