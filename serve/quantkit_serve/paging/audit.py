"""What was found wrong with pages, for whoever looks into it afterwards: latest findings, counts, a log line each.

A finding ends one request and no more, so the process that has one goes on; this is what is left of it.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from typing import Literal, NamedTuple

Where = Literal["step", "prefix", "release", "hand-off"]
KEPT = 256  # findings; counts go on

_log = logging.getLogger(__name__)


class Finding(NamedTuple):
    """A page that is not, or no longer, what somebody took it for.

    Attributes:
        where: ``step`` (the check before a step), ``prefix`` (an entry of the prefix index), ``release`` (the page
            was left alone), ``hand-off``.
        page: that the reference names.
        expected_tag, found_tag: equal when something else than the tag was wrong.
        owner: whose reference it was, empty where it was the index's.
        holders: who holds the page now.
    """

    where: Where
    page: int
    expected_tag: int
    found_tag: int
    owner: str
    holders: tuple[str, ...]


class Audit:
    """Attributes: ``findings``, the latest; ``counts``, of all since the start, by ``where``."""

    def __init__(self) -> None:
        self.findings: deque[Finding] = deque(maxlen=KEPT)
        self.counts: Counter[str] = Counter()

    def record(self, finding: Finding) -> None:
        self.findings.append(finding)
        self.counts[finding.where] += 1
        _log.warning(
            "KV page %d: expected tag %d, found %d (%s, reference of %s, held by %s)",
            finding.page,
            finding.expected_tag,
            finding.found_tag,
            finding.where,
            finding.owner or "nobody",
            ", ".join(finding.holders) or "nobody",
        )
