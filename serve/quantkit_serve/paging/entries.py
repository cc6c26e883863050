"""A sequence's list of pages, which knows how much of it has been copied into the arrays of a step.

A decode step adds at most one page to a sequence, so copying whole block tables each step would be nearly all
wasted: 64 x 256 entries are milliseconds in Python. A plain list can't tell that an entry in its middle has
changed. This one can: whatever changes an entry lowers ``clean``, and ``tags.py`` copies from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar, overload

T = TypeVar("T")


class Entries(Sequence[T]):
    """Grows at its end; entries may be replaced, and dropped from the end.

    Attributes:
        items: what is in it; read only.
        home, slot, clean: whose arrays have a copy, in which row, of how many leading entries; for ``tags.py``.
    """

    __slots__ = ("clean", "home", "items", "slot")

    def __init__(self, items: Iterable[T] = ()) -> None:
        self.items: list[T] = list(items)
        self.home: object = None
        self.slot = self.clean = 0

    def append(self, item: T) -> None:
        self.items.append(item)

    def extend(self, items: Iterable[T]) -> None:
        self.items.extend(items)

    def truncate(self, count: int) -> None:
        """Drop all but the first ``count`` entries."""
        del self.items[count:]
        self.clean = min(self.clean, len(self.items))

    def clear(self) -> None:
        self.truncate(0)

    def __setitem__(self, index: int, item: T) -> None:
        self.items[index] = item
        self.clean = min(self.clean, range(len(self.items))[index])

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[T]:
        return iter(self.items)

    def __reversed__(self) -> Iterator[T]:
        return reversed(self.items)

    def __repr__(self) -> str:
        return f"Entries({self.items!r})"
