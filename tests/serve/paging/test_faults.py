"""Each injected fault is met by the guard named for it; with tags off its damage is there to see."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from quantkit_serve.paging import (
    FAULTS,
    Canary,
    Entries,
    Fault,
    IntegrityError,
    PagePool,
    PageRef,
    PrefixIndex,
    Scene,
    Victim,
    block_tables,
)
from quantkit_serve.paging.faults import LateWrite

PAGES, PAGE_SIZE = 8, 4


@dataclass
class Asked:
    """A request whose content is its own name, all over its pages."""

    owner: str
    table: Entries[int] = field(default_factory=Entries)
    expected: Entries[PageRef] = field(default_factory=Entries)


class World:
    """A pool with memory, driven as the engine does."""

    def __init__(self, *, is_tagged: bool) -> None:
        self.pool = PagePool(PAGES, is_tagged=is_tagged)
        self.index = PrefixIndex(self.pool, PAGE_SIZE)
        self.tables = block_tables(self.pool, 4, PAGES)
        self.memory = np.zeros((PAGES, PAGE_SIZE), np.uint8)

    def ask(self, owner: str, count: int) -> Asked:
        asked = Asked(owner)
        self.give(asked, self.pool.allocate(count, owner))
        for page in asked.table:
            self.memory[page] = ord(owner)
        return asked

    def give(self, asked: Asked, refs: list[PageRef]) -> None:
        asked.expected.extend(refs)
        asked.table.extend(ref.page for ref in refs)

    def read(self, asked: Asked) -> str:
        """What attention would read for it."""
        return "".join(chr(byte) for page in asked.table for byte in self.memory[page][:1])

    def scene(self, *victims: Asked) -> Scene:
        def scribble(page: int) -> None:
            self.memory[page] = ord("!")

        return Scene(self.pool, [Victim(v.owner, v.table, v.expected) for v in victims], scribble)

    def strike(self, fault: Fault, *victims: Asked) -> str | None:
        return fault.strike(self.scene(*victims))

    def step(self, *batch: Asked) -> list[str]:
        """Those that the check ends; everybody's pages are where they should be for the others."""
        self.tables.fill([one.table for one in batch], [one.expected for one in batch])
        return sorted({batch[found.row].owner for found in self.tables.check()})

    def books(self, *alive: Asked) -> None:
        self.pool.check_integrity({one.owner: one.expected for one in alive})


@pytest.fixture
def tagged() -> World:
    return World(is_tagged=True)


@pytest.fixture
def untagged() -> World:
    return World(is_tagged=False)


def test_names() -> None:
    assert sorted(FAULTS) == ["double-allocate", "free-early", "late-write", "remap", "stale-prefix"]


@pytest.mark.parametrize("name", FAULTS)
def test_nothing_to_break_yet(name: str, tagged: World) -> None:
    fault = FAULTS[name]()
    assert tagged.strike(fault) is None
    assert tagged.strike(fault, Asked("a")) is None
    tagged.books()


def test_a_page_that_others_may_read_is_not_freed_early(tagged: World) -> None:
    a = tagged.ask("a", 1)
    tagged.pool.share(a.expected, "b")
    assert tagged.strike(FAULTS["free-early"](), a) is None


def test_free_early_is_met_at_once(tagged: World) -> None:
    a, b = tagged.ask("a", 2), tagged.ask("b", 2)
    assert tagged.step(a, b) == []
    assert tagged.strike(FAULTS["free-early"](), a, b) == f"page {a.table[1]} of a freed"
    assert tagged.step(a, b) == ["a"]  # before anybody else has the page
    assert tagged.pool.release(a.expected, "a") == [a.expected[1]]
    tagged.books(b)
    assert tagged.step(b) == [] and tagged.read(b) == "bb"


def test_free_early_is_met_when_the_page_has_a_new_owner(tagged: World) -> None:
    a = tagged.ask("a", 2)
    tagged.strike(FAULTS["free-early"](), a)
    c = tagged.ask("c", 1)
    assert c.table[0] == a.table[1]
    assert tagged.step(a, c) == ["a"]
    assert tagged.pool.release(a.expected, "a") == [a.expected[1]]
    assert tagged.pool.audit.findings[-1].holders == ("c",)
    tagged.books(c)  # c's page was left alone
    assert tagged.step(c) == []


def test_free_early_without_tags_lets_one_read_the_other(untagged: World) -> None:
    a = untagged.ask("a", 2)
    untagged.strike(FAULTS["free-early"](), a)
    c = untagged.ask("c", 1)
    assert untagged.step(a, c) == []
    assert untagged.read(a) == "ac"


def test_double_allocate_is_met_when_the_second_has_it(tagged: World) -> None:
    a = tagged.ask("a", 2)
    assert tagged.strike(FAULTS["double-allocate"](), a) is not None
    assert tagged.step(a) == []  # nothing has happened to it yet
    with pytest.raises(IntegrityError, match=f"page {a.table[1]} is free and used"):
        tagged.books(a)
    b = tagged.ask("b", 2)
    assert a.table[1] in b.table
    assert tagged.step(a, b) == ["a"]
    assert tagged.pool.release(a.expected, "a") == [a.expected[1]]
    tagged.books(b)
    assert tagged.step(b) == [] and tagged.read(b) == "bb"


def test_double_allocate_without_tags_lets_one_read_the_other(untagged: World) -> None:
    a = untagged.ask("a", 2)
    untagged.strike(FAULTS["double-allocate"](), a)
    b = untagged.ask("b", 2)
    assert untagged.step(a, b) == []
    assert untagged.read(a) == "ab"


def test_remap_is_met_and_all_of_its_pages_come_back(tagged: World) -> None:
    a, b = tagged.ask("a", 2), tagged.ask("b", 2)
    tagged.step(a, b)
    own = a.table[0]
    assert tagged.strike(FAULTS["remap"](), a, b) == f"entry 0 of a: page {own} became {b.table[0]}, of b"
    assert tagged.step(a, b) == ["a"]
    assert tagged.pool.release(a.expected, "a") == []
    tagged.books(b)
    assert tagged.step(b) == []


def test_remap_takes_an_entry_that_is_not_shared(tagged: World) -> None:
    a, b = tagged.ask("a", 2), tagged.ask("b", 2)
    b.table[0] = a.table[0]
    own = a.table[1]
    assert tagged.strike(FAULTS["remap"](), a, b) == f"entry 1 of a: page {own} became {b.table[1]}, of b"


def test_remap_without_tags_lets_one_read_the_other(untagged: World) -> None:
    a, b = untagged.ask("a", 2), untagged.ask("b", 2)
    untagged.step(a, b)
    untagged.strike(FAULTS["remap"](), a, b)
    assert untagged.step(a, b) == []
    assert untagged.read(a) == "ba"


def remember(world: World) -> tuple[int, ...]:
    """A prompt of two pages, cached."""
    prompt = tuple(range(2 * PAGE_SIZE))
    a = world.ask("a", 2)
    assert world.index.insert(prompt, "", a.expected) == a.expected[:]
    world.pool.release(a.expected, "a")
    assert world.index.match(prompt) == a.expected[:]
    return prompt


@pytest.mark.parametrize("is_given_out", [False, True])
def test_a_stale_prefix_entry_is_dropped_when_it_is_hit(tagged: World, is_given_out: bool) -> None:
    prompt = remember(tagged)
    assert tagged.strike(FAULTS["stale-prefix"]()) is not None
    others = [tagged.ask("b", 1)] if is_given_out else []
    assert tagged.index.match(prompt) == []
    assert (tagged.index.num_stale, len(tagged.index)) == (1, 0)
    assert tagged.pool.audit.counts["prefix"] == 1
    tagged.books(*others)


def test_a_stale_prefix_entry_is_replaced_by_the_next_writer(tagged: World) -> None:
    prompt = remember(tagged)
    tagged.strike(FAULTS["stale-prefix"]())
    b = tagged.ask("b", 2)
    assert tagged.index.insert(prompt, "", b.expected) == b.expected[:]
    assert tagged.index.match(prompt) == b.expected[:] and tagged.index.num_stale == 1
    tagged.books(b)


def test_a_stale_prefix_entry_makes_room_for_the_page_as_it_is_now(tagged: World) -> None:
    remember(tagged)
    tagged.strike(FAULTS["stale-prefix"]())
    b = tagged.ask("b", 1)
    assert tagged.index.insert([9] * PAGE_SIZE, "", b.expected) == b.expected[:]
    assert tagged.index.match([9] * PAGE_SIZE) == b.expected[:]
    tagged.books(b)


def test_a_stale_prefix_entry_without_tags_gives_somebody_elses_content(untagged: World) -> None:
    prompt = remember(untagged)
    untagged.strike(FAULTS["stale-prefix"]())
    b = untagged.ask("b", 1)
    c = Asked("c")
    hits = untagged.index.match(prompt)
    untagged.pool.share(hits, "c")
    untagged.give(c, hits)
    assert untagged.step(b, c) == []
    assert untagged.read(c) == "ba"


@pytest.mark.parametrize("is_tagged", [True, False])
def test_a_late_write_meets_the_quarantine(is_tagged: bool) -> None:
    world, fault = World(is_tagged=is_tagged), FAULTS["late-write"]()
    a = world.ask("a", 2)
    assert world.strike(fault, a) is None
    assert world.strike(fault, a) is None  # a goes on
    assert world.pool.release(a.expected, "a") == []
    assert world.pool.counts() == (PAGES - 1, 0, 0, 1)
    b = world.ask("b", PAGES - 1)
    assert a.table[1] not in b.table
    assert world.strike(fault, b) == f"page {a.table[1]} written for a, which has ended; held by nobody"
    assert world.read(b) == "b" * (PAGES - 1)
    world.books(b)
    assert world.pool.counts() == (1, PAGES - 1, 0, 0)


def test_a_late_write_without_quarantine_is_seen_by_the_canary_alone(tagged: World) -> None:
    fault = LateWrite(has_quarantine=False)
    a = tagged.ask("a", 1)
    tagged.strike(fault, a)
    tagged.pool.release(a.expected, "a")
    b = tagged.ask("b", 2)
    assert a.table[0] in b.table
    canary = Canary([tagged.memory])
    seals = canary.seal(b.expected)
    assert canary.check(seals) == []
    assert tagged.strike(fault, b) == f"page {a.table[0]} written for a, which has ended; held by b"
    assert tagged.read(b) == "!b"
    assert tagged.step(b) == [] and tagged.pool.stale(b.expected, "b") == []  # tags don't see it
    assert [ref.page for ref in canary.check(seals)] == [a.table[0]]
