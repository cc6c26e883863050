"""From prefill to decode: a message that says where a request's keys and values are. Nothing is copied.

Decode takes a request over only if every page of the message is still the one that prefill filled (its tag), is in
the request's block table where the message has it, and covers as many tokens as the request has computed. With a
canary, the bytes are compared as well with what prefill left. What doesn't fit ends that request.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

from ..engine.sequence import Sequence
from ..paging import Canary, PagePool, PageRef, Seal
from ..service import HANDOFF_BOUNDS_S, Durations


class HandOff(NamedTuple):
    """The message.

    Attributes:
        request_id: whose pages these are.
        refs: with the tags that the request was given them by.
        position: of the first token to decode; those before are in the pages.
        sent_s: when prefill was done with it (``time.monotonic``).
        seals: of the bytes of the pages; empty without a canary.
    """

    request_id: str
    refs: tuple[PageRef, ...]
    position: int
    sent_s: float
    seals: tuple[Seal, ...] = ()


class HandOffs:
    """Writes and checks messages, and counts.

    Args:
        pool: of the pages.
        canary: None: bytes aren't compared.
        clock: seconds.

    Attributes:
        num_checks, num_mismatches: messages checked, and pages that did not fit.
    """

    def __init__(self, pool: PagePool, canary: Canary | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool, self._canary, self._clock = pool, canary, clock
        self._counts = [0] * (len(HANDOFF_BOUNDS_S) + 1)
        self._total_s = 0.0
        self.num_checks = self.num_mismatches = 0

    def seal(self, sequence: Sequence) -> tuple[Seal, ...]:
        """Of the bytes of its pages, once prefill is done with all of its prompt and as long as nobody else can
        have them. Takes a millisecond per MB, and no lock."""
        return () if self._canary is None else tuple(self._canary.seal(tuple(sequence.expected)))

    def write(self, sequence: Sequence, seals: tuple[Seal, ...] = ()) -> HandOff:
        """Once prefill is done with all of its prompt."""
        refs = tuple(sequence.expected)
        return HandOff(sequence.request_id, refs, sequence.num_computed, self._clock(), seals)

    def accept(self, message: HandOff, sequence: Sequence) -> str | None:
        """Check it; None if all fits, or what doesn't."""
        self.num_checks += 1
        error = self._tags(message) or self._table(message, sequence) or self._content(message)
        if error is None:
            seconds = self._clock() - message.sent_s
            self._counts[bisect_left(HANDOFF_BOUNDS_S, seconds)] += 1
            self._total_s += seconds
        return error

    @property
    def seconds(self) -> Durations:
        """From the end of prefill until decode has taken over."""
        return Durations(tuple(self._counts), self._total_s)

    def _tags(self, message: HandOff) -> str | None:
        stale = self._pool.stale(message.refs, message.request_id)
        self.num_mismatches += len(stale)
        if not stale:
            return None
        return f"page {stale[0].page} no longer has tag {stale[0].tag}, with which prefill filled it"

    def _table(self, message: HandOff, sequence: Sequence) -> str | None:
        pages = [ref.page for ref in message.refs]
        if pages == list(sequence.table) and message.position == sequence.num_computed:
            return None
        self.num_mismatches += 1
        return (
            f"the block table doesn't have the {len(pages)} pages of {message.position} tokens that prefill filled"
        )

    def _content(self, message: HandOff) -> str | None:
        changed = [] if self._canary is None else self._canary.check(message.seals)
        if not changed:
            return None
        return f"the content of page {changed[0].page} is not what prefill left in it"
