"""Random sequences of what an engine does, held against plain dictionaries, books checked after each.

The model knows nothing of references, tags, digests or lists of free pages: only who holds which page, what was
written to it, and which pages a launched step touches.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quantkit_serve.paging import Entries, OutOfPages, PagePool, PageRef, PrefixIndex, block_tables
from quantkit_serve.paging.prefix import chained_blake2b

PAGES, PAGE_SIZE, MOST = 12, 2, 6
BEGINNINGS = ((0,) * 8, (0, 0, 0, 0, 1, 1, 1, 1))  # so that many prompts begin alike
PROMPTS = st.builds(
    lambda beginning, count, rest: [*beginning[:count], *rest],
    st.sampled_from(BEGINNINGS),
    st.integers(2, 8),
    st.lists(st.integers(0, 1), min_size=1, max_size=2),
)
SALTS = st.sampled_from(["", "b"])
Content = tuple[str, tuple[int, ...]]  # salt or owner, and all tokens up to the page's end


@dataclass
class Held:
    prompt: list[int]
    salt: str
    table: Entries[int] = field(default_factory=Entries)
    expected: Entries[PageRef] = field(default_factory=Entries)


def part_digest(parent: bytes, content: bytes) -> bytes:
    """Two bits: most entries collide."""
    return bytes([chained_blake2b(parent, content)[0] & 3])


class Engine(RuleBasedStateMachine):
    is_tagged = True
    digest = staticmethod(chained_blake2b)

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES, is_tagged=self.is_tagged)
        self.index = PrefixIndex(self.pool, PAGE_SIZE, digest=self.digest)
        self.tables = block_tables(self.pool, MOST, PAGES)
        self.sequences: dict[str, Held] = {}
        self.content: dict[int, Content] = {}
        self.known: dict[Content, int] = {}  # of the index
        self.flights: dict[int, set[int]] = {}
        self.seen: set[int] = set()
        self.number = 0

    # -- the model

    def holders(self, page: int) -> set[str]:
        return {name for name, one in self.sequences.items() if page in one.table}

    def is_flying(self, page: int) -> bool:
        return any(page in pages for pages in self.flights.values())

    def state(self, page: int) -> str:
        if self.holders(page):
            return "used"
        if page in self.known.values():
            return "cached"
        return "quarantined" if self.is_flying(page) else "free"

    def chain(self, one: Held) -> list[Content]:
        full = len(one.prompt) // PAGE_SIZE
        return [(one.salt, tuple(one.prompt[: (i + 1) * PAGE_SIZE])) for i in range(full)]

    def allocate(self, name: str, count: int) -> bool:
        """As the engine does; False if there aren't as many."""
        states = {page: self.state(page) for page in range(PAGES)}
        usable = {p for p, s in states.items() if s == "free" or (s == "cached" and not self.is_flying(p))}
        one = self.sequences[name]
        try:
            refs = self.pool.allocate(count, name)
        except OutOfPages as error:
            assert (error.wanted, error.available) == (count, len(usable)) and count > len(usable)
            assert self.known == self.forgotten()
            return False
        pages = {ref.page for ref in refs}
        assert len(pages) == count and pages <= usable
        num_free = sum(state == "free" for state in states.values())
        gone = {c: p for c, p in self.known.items() if c not in self.forgotten()}
        assert bool(gone) == (count > num_free)
        self.known = self.forgotten()
        if self.is_tagged:
            assert not {ref.tag for ref in refs} & self.seen and 0 not in {ref.tag for ref in refs}
            self.seen |= {ref.tag for ref in refs}
        for ref in refs:
            index = len(one.table)
            one.table.append(ref.page)
            one.expected.append(ref)
            chain = self.chain(one)
            self.content[ref.page] = chain[index] if index < len(chain) else (f"{name} {index}", ())
        return True

    def forgotten(self) -> dict[Content, int]:
        return {content: page for content, page in self.known.items() if self.index.holds(page)}

    def drop(self, name: str) -> None:
        one = self.sequences.pop(name)
        assert self.pool.release(one.expected, name) == []

    # -- what an engine does

    @precondition(lambda self: len(self.sequences) < MOST)
    @rule(prompt=PROMPTS, salt=SALTS, is_quick=st.booleans(), swaps=st.booleans())
    def start(self, prompt: list[int], salt: str, is_quick: bool, swaps: bool) -> None:
        self.number += 1
        name, one = f"r{self.number}", Held(prompt, salt)
        hits = self.index.match(prompt[:-1], salt)
        chain = self.chain(Held(prompt[:-1], salt))
        assert [self.content[ref.page] for ref in hits] == chain[: len(hits)]
        if self.digest is chained_blake2b:
            longest = next((i for i, c in enumerate(chain) if c not in self.known), len(chain))
            assert [ref.page for ref in hits] == [self.known[c] for c in chain[:longest]]
        self.pool.share(hits, name)
        one.table.extend(ref.page for ref in hits)
        one.expected.extend(hits)
        self.sequences[name] = one
        if not self.allocate(name, -(-len(prompt) // PAGE_SIZE) - len(hits)):
            self.drop(name)
        elif is_quick:
            self.prefilled(name, swaps)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), swaps=st.booleans())
    def finish_prefill(self, data: st.DataObject, swaps: bool) -> None:
        self.prefilled(data.draw(st.sampled_from(sorted(self.sequences))), swaps)

    def prefilled(self, name: str, swaps: bool) -> None:
        """Its full pages enter the index; ``swaps``: and are replaced by those that were there first."""
        one, chain = self.sequences[name], self.chain(self.sequences[name])
        found = self.index.insert(one.prompt, one.salt, one.expected)
        assert len(found) == len(chain) and [self.content[ref.page] for ref in found] == chain
        for content, ref in zip(chain, found, strict=True):
            if self.index.holds(ref.page):
                assert self.known.setdefault(content, ref.page) == ref.page
        assert self.digest is not chained_blake2b or set(chain) <= set(self.known)
        if swaps:
            for i, ref in enumerate(found):
                if ref != one.expected[i]:
                    self.pool.share([ref], name)
                    assert self.pool.release([one.expected[i]], name) == []
                    one.table[i], one.expected[i] = ref.page, ref

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), count=st.integers(1, 3))
    def grow(self, data: st.DataObject, count: int) -> None:
        self.allocate(data.draw(st.sampled_from(sorted(self.sequences))), count)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.drop(data.draw(st.sampled_from(sorted(self.sequences))))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """The lists stay and are filled again later, at other pages."""
        name = data.draw(st.sampled_from(sorted(self.sequences)))
        one = self.sequences[name]
        assert self.pool.release(one.expected, name) == []
        one.table.clear()
        one.expected.clear()
        if not self.allocate(name, -(-len(one.prompt) // PAGE_SIZE)):
            del self.sequences[name]

    @rule(data=st.data())
    def launch(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.sequences)), unique=True)) if self.sequences else []
        batch = [self.sequences[name] for name in names]
        table = self.tables.fill([one.table for one in batch], [one.expected for one in batch])
        assert self.tables.check() == []
        assert [table[i, : len(one.table)].tolist() for i, one in enumerate(batch)] == [o.table[:] for o in batch]
        pages = {page for one in batch for page in one.table}
        self.flights[self.pool.launch(sorted(pages))] = pages

    @precondition(lambda self: self.flights)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.flights)))
        self.pool.landed(ticket)
        del self.flights[ticket]

    @invariant()
    def books_agree(self) -> None:
        self.pool.check_integrity({name: one.expected for name, one in self.sequences.items()})
        assert self.known == self.forgotten()
        states = [self.state(page) for page in range(PAGES)]
        counts = self.pool.counts()
        assert counts._asdict() == {name: states.count(name) for name in counts._fields}
        assert len(self.index) == len(self.known)
        tags = self.pool.tags
        for page, state in enumerate(states):
            assert set(self.pool.owners(page)) == self.holders(page)
            if tags is not None and state in ("free", "quarantined"):
                assert int(tags[page]) not in self.seen  # fails at once, not only when it is given out again
        assert not self.pool.audit.counts

    def teardown(self) -> None:
        for name in list(self.sequences):
            self.drop(name)
        for ticket in self.flights:
            self.pool.landed(ticket)
        counts = self.pool.counts()
        assert (counts.used, counts.quarantined, counts.free + counts.cached) == (0, 0, PAGES)
        assert len(self.pool.allocate(PAGES, "all")) == PAGES and len(self.index) == 0


class Untagged(Engine):
    is_tagged = False


class Colliding(Engine):
    digest = staticmethod(part_digest)


@pytest.mark.parametrize("machine", [Engine, Untagged, Colliding])
def test_random_operations(machine: type[Engine]) -> None:
    case = machine.TestCase
    case.settings = settings(
        max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )
    case("runTest").runTest()
