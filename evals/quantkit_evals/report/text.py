"""Text from strangers (task names, item ids, labels) made safe to print: controls are spelt out, not dropped."""

from __future__ import annotations

import re

# What XML 1.0 can't hold, what moves a cursor or reverses text, and halves of surrogate pairs. Line ends, tabs
# included, are spelt out too: all that goes through here stands in one line.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def one_line(text: str) -> str:
    """Text in one line that UTF-8 and XML can hold (``\\x1b``, ``\\n``)."""
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
