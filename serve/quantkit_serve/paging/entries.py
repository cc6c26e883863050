"""A sequence's list of pages, which knows how much of it has been copied into the arrays of a step.

A decode step adds at most one page to a sequence, so copying whole block tables each step would be nearly all
wasted: 64 x 256 entries are milliseconds in Python. A plain list can't tell that an entry in its middle has
changed. This one can: whatever changes an entry lowers ``clean``, and ``tags.py`` copies from there. Its home is
told of every change, so that a step of the same sequences and pages as the one before has its table already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeVar, overload

T = TypeVar("T")


class Home(Protocol):
    """Of copies; ``is_current``: nothing has changed since its latest step."""

    is_current: bool


class Entries(Sequence[T]):
    """Grows at its end; entries may be replaced, and dropped from the end.

    Attributes:
        items: what is in it; read only.
        home, slot, clean: whose arrays have a copy, in which row, of how many leading entries; for ``tags.py``.
    """

    __slots__ = ("clean", "home", "items", "slot")

    def __init__(self, items: Iterable[T] = ()) -> None:
        self.items: list[T] = list(items)
        self.home: Home | None = None
        self.slot = self.clean = 0

    def append(self, item: T) -> None:
        self.items.append(item)
        self._tell()

    def extend(self, items: Iterable[T]) -> None:
        self.items.extend(items)
        self._tell()

    def truncate(self, count: int) -> None:
        """Drop all but the first ``count`` entries."""
        del self.items[count:]
        self.clean = min(self.clean, len(self.items))
        self._tell()

    def clear(self) -> None:
        self.truncate(0)

    def __setitem__(self, index: int, item: T) -> None:
        self.items[index] = item
        self.clean = min(self.clean, range(len(self.items))[index])
        self._tell()

    def _tell(self) -> None:
        if self.home is not None:
            self.home.is_current = False

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
