"""What was found wrong with pages, for whoever looks into it afterwards: latest findings, counts, a log line each.

A finding ends one request and no more, so the process that has one goes on; this is what is left of it.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

from .page import PageRef

Where = Literal["step", "prefix", "release", "hand-off"]
KEPT = 256  # findings; counts go on

_log = logging.getLogger(__name__)


class Finding(NamedTuple):
    """A page that is not, or no longer, what somebody took it for.

    Attributes:
        where: ``step`` (the check before a step), ``prefix`` (an entry of the prefix index), ``release`` (the page
            was left alone), ``hand-off``.
        page: that would have been used.
        expected: that should have been; the same page with another tag, unless a block table was wrong.
        found_tag: of ``page``; the expected one where somebody else held the page under it.
        owner: whose reference it was; empty where it was the index's, or that of a step's row.
        holders: who holds ``page`` now.
    """

    where: Where
    page: int
    expected: PageRef
    found_tag: int
    owner: str
    holders: tuple[str, ...]


class Audit:
    """Attributes: ``findings``, the latest; ``counts``, of all since the start, by ``where``."""

    def __init__(self) -> None:
        self.findings: deque[Finding] = deque(maxlen=KEPT)
        self.counts: Counter[str] = Counter()

    def record(self, findings: Sequence[Finding]) -> None:
        """Findings about one request, one log line for all of them."""
        if not findings:
            return
        self.findings.extend(findings)
        first = findings[0]
        self.counts[first.where] += len(findings)
        _log.warning(
            "KV page %d with tag %d instead of page %d with tag %d (%s, reference of %s, held by %s)%s",
            first.page,
            first.found_tag,
            first.expected.page,
            first.expected.tag,
            first.where,
            first.owner or "nobody",
            ", ".join(first.holders) or "nobody",
            f" and {len(findings) - 1} more" if len(findings) > 1 else "",
        )
