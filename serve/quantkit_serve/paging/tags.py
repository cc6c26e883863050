"""Block tables of a step, and the one check that every page in them is still its sequence's.

A sequence keeps two lists apart: its table, which attention gets, and the (page, tag) pairs that it was given.
Both live here in arrays with a row for each sequence that runs, to which only what is new is copied
(``entries.py``); a step gathers the rows of its batch, unless they are those of the step before. The check
compares the gathered table, the very array that the runner gets, with what is expected and with the tags that the
pool has now: nothing may be allocated or freed between it and launch.

What it finds: pages freed too early, given out twice, tables that point elsewhere. What it can't: somebody who
writes into a page that isn't his (the pool's quarantine prevents the known way to do so), or content that was
wrong when it was written (``canary.py`` sees a change since).

Tags off is the base class: no array of theirs, and nothing to branch on.

Legend: R sequences of the step, P entries of its longest table, N pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from quantkit_kernels.tags import prepared_check

from .audit import Finding
from .entries import Entries
from .page import PageRef
from .pool import PagePool

T = TypeVar("T")
I32 = NDArray[np.int32]
U64 = NDArray[np.uint64]
_NOWHERE = -1  # a page that fits none


class Mismatch(NamedTuple):
    """An entry of a table that is not what its sequence was given.

    Attributes:
        row: of the batch.
        entry: of the table.
        page: that the table has there, -1 if it ends before.
        expected: what the sequence was given there; (-1, 0) if it was given less.
        found_tag: the tag that ``page`` has now; 0 outside the pool.
        holders: who holds ``page`` now.
    """

    row: int
    entry: int
    page: int
    expected: PageRef
    found_tag: int
    holders: tuple[str, ...]


class _Rows(Generic[T]):
    """Copies of lists in the rows ("slots") of arrays; the list used longest ago makes room.

    Args:
        num_rows, num_entries: shape of the arrays.
        write: puts items into a slot from an entry on.

    Attributes:
        is_current: the lists of the latest ``update`` are here, and have not changed since.
    """

    def __init__(self, num_rows: int, num_entries: int, write: Callable[[int, int, list[T]], None]) -> None:
        self._lists: list[Entries[T] | None] = [None] * num_rows
        self._used = [0] * num_rows
        self._step = 0
        self._num_entries = num_entries
        self._write = write
        self._latest: list[Entries[T]] = []
        self.is_current = False

    def has(self, lists: Sequence[Entries[T]]) -> bool:
        """Whether ``update`` would find nothing new."""
        return self.is_current and self._latest == lists

    def update(self, lists: Sequence[Entries[T]]) -> list[int]:
        """Copy what is new of each list; their slots.

        Raises:
            ValueError: more lists than rows, or one with more items than a row has entries.
        """
        if len(lists) > len(self._lists):
            raise ValueError(f"{len(lists)} sequences in a step, at most {len(self._lists)} can be")
        self.is_current = False
        self._step += 1
        step, used = self._step, self._used
        slots = []
        for entries in lists:
            if entries.home is not self:
                self._take(entries)
            if entries.clean < len(entries.items):
                self._copy(entries)
            used[entries.slot] = step
            slots.append(entries.slot)
        self._latest, self.is_current = list(lists), True
        return slots

    def _take(self, entries: Entries[T]) -> None:
        """The slot used longest ago: never one of this step's that has its list already. A list that comes later
        in the step may lose its slot, and takes another one.
        """
        slot = self._used.index(min(self._used))
        former = self._lists[slot]
        if former is not None and former.home is self and former.slot == slot:  # else other tables took it since
            former.home = None
        self._lists[slot] = entries
        if entries.home is not None:
            entries.home.is_current = False
        entries.home, entries.slot, entries.clean = self, slot, 0

    def _copy(self, entries: Entries[T]) -> None:
        if len(entries.items) > self._num_entries:
            raise ValueError(f"{len(entries.items)} pages in a sequence, at most {self._num_entries} can be")
        self._write(entries.slot, entries.clean, entries.items[entries.clean :])
        entries.clean = len(entries.items)


class BlockTables:
    """Tables without tags.

    Args:
        max_rows: sequences of a step.
        max_entries: pages of a sequence.

    Attributes:
        counts: int32 ``[R]``, pages of each sequence in the latest ``fill``; in arrays of its own, as the table.
        num_checks, num_mismatches: steps checked, and entries that did not fit.
    """

    def __init__(self, max_rows: int, max_entries: int) -> None:
        self._tables = np.zeros((max_rows, max_entries), np.int32)
        self._table_rows = _Rows(max_rows, max_entries, self._write_table)
        self._table = np.zeros((0, 0), np.int32)
        self.counts = np.zeros(0, np.int32)
        self.num_checks = self.num_mismatches = 0

    def fill(self, tables: Sequence[Entries[int]], expected: Sequence[Entries[PageRef]]) -> I32:
        """The block table of a step, int32 ``[R, P]``; entries beyond a table's end may be anything.

        Nothing writes to it later; the next step has the same array if it has the same tables, unchanged.

        Args:
            tables: of the sequences, in the order of the batch.
            expected: what they were given, to ``check`` by.

        Raises:
            ValueError: more sequences, or more pages in one, than there is room for.
        """
        if not self._table_rows.has(tables):
            slots, lengths = self._table_rows.update(tables), [len(table.items) for table in tables]
            self._table = self._tables[:, : max(lengths, default=0)][slots]
            self.counts = np.array(lengths, np.int32)
        return self._table

    def check(self) -> list[Mismatch]:
        """Entries of the latest ``fill`` that are not what they should be; right before launch."""
        return []

    def _write_table(self, slot: int, start: int, pages: list[int]) -> None:
        self._tables[slot, start : start + len(pages)] = pages


class TagCheck(BlockTables):
    """Tables with tags; see the module.

    Args:
        pool: with tags.
        max_rows, max_entries: as in ``BlockTables``.

    Raises:
        ValueError: the pool has no tags.
    """

    def __init__(self, pool: PagePool, max_rows: int, max_entries: int) -> None:
        super().__init__(max_rows, max_entries)
        if pool.tags is None:
            raise ValueError("the pool has no tags to check")
        self._pool, self._pool_tags = pool, pool.tags
        self._pages = np.zeros((max_rows, max_entries), np.int32)
        self._tags = np.zeros((max_rows, max_entries), np.uint64)
        self._expected_rows = _Rows(max_rows, max_entries, self._write_expected)
        self._expected: tuple[I32, U64]
        self._gather([], [], [], [])

    def fill(self, tables: Sequence[Entries[int]], expected: Sequence[Entries[PageRef]]) -> I32:
        if len(tables) != len(expected):
            raise ValueError(f"{len(tables)} tables, but {len(expected)} lists of what is expected")
        if not (self._table_rows.has(tables) and self._expected_rows.has(expected)):
            self._gather(
                self._table_rows.update(tables),
                self._expected_rows.update(expected),
                [len(table.items) for table in tables],
                [len(refs.items) for refs in expected],
            )
        return self._table

    def check(self) -> list[Mismatch]:
        self.num_checks += 1
        is_good = self._compare()
        return self._explain([row for row, good in enumerate(is_good) if not good]) if 0 in is_good else []

    def _gather(
        self, slots: list[int], expected_slots: list[int], lengths: list[int], expected_lengths: list[int]
    ) -> None:
        """Table, expected pages and tags, and how many of each row count."""
        counts = lengths if lengths == expected_lengths else list(map(max, lengths, expected_lengths))
        width = max(counts, default=0)
        table = self._tables[:, :width][slots]
        rows = np.array(expected_slots, np.intp)
        pages, tags = self._pages[:, :width][rows], self._tags[:, :width][rows]
        if counts is not lengths:  # whatever one has more than the other is wrong
            for row, (length, expected_length) in enumerate(zip(lengths, expected_lengths, strict=True)):
                table[row, length : counts[row]] = _NOWHERE
                pages[row, expected_length : counts[row]] = _NOWHERE
                tags[row, expected_length : counts[row]] = 0
        self._table, self._expected, self.counts = table, (pages, tags), np.array(counts, np.int32)
        self._compare = prepared_check(table, pages, tags, self._pool_tags, self.counts)

    def _explain(self, rows: list[int]) -> list[Mismatch]:
        (table, counts), (pages, tags) = (self._table, self.counts), self._expected
        found = []
        for row in rows:
            for entry in range(counts[row]):
                page, expected = int(table[row, entry]), PageRef(int(pages[row, entry]), int(tags[row, entry]))
                is_inside = 0 <= page < len(self._pool_tags)
                tag = int(self._pool_tags[page]) if is_inside else 0
                if not is_inside or (page, tag) != expected:
                    found.append(Mismatch(row, entry, page, expected, tag, self._pool.owners(page)))
        self.num_mismatches += len(found)
        for row in rows:
            self._pool.audit.record(
                [Finding("step", m.page, m.expected, m.found_tag, "", m.holders) for m in found if m.row == row]
            )
        return found

    def _write_expected(self, slot: int, start: int, refs: list[PageRef]) -> None:
        end = start + len(refs)
        self._pages[slot, start:end] = [ref.page for ref in refs]
        self._tags[slot, start:end] = np.array([ref.tag for ref in refs], np.uint64)


def block_tables(pool: PagePool, max_rows: int, max_entries: int) -> BlockTables:
    """With the check if the pool has tags."""
    return BlockTables(max_rows, max_entries) if pool.tags is None else TagCheck(pool, max_rows, max_entries)
