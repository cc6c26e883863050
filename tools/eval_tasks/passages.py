"""The held-out text as passages: its paragraphs, which are what a document was in training."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from quantkit.data import bundled_text

SHARED_WORDS = 8  # a run of so many words that the calibration text has, too, is not chance
T = TypeVar("T")


@dataclass(frozen=True)
class Passage:
    """One paragraph.

    Attributes:
        name: ``p0042``, by its place in the whole text: the cluster of its items.
        text: one line; runs of white space are one space.
    """

    name: str
    text: str

    @property
    def words(self) -> list[str]:
        return self.text.split(" ")

    @property
    def sentences(self) -> list[str]:
        return re.split(r"(?<=[.!?]) (?=[A-Z\"'])", self.text)


@cache
def passages() -> tuple[Passage, ...]:
    """All passages of the held-out text that share no run of words with the calibration text, in order."""
    known = runs(bundled_text("calib").read_text(encoding="utf-8"))
    found = []
    for index, paragraph in enumerate(bundled_text("heldout").read_text(encoding="utf-8").split("\n\n")):
        passage = Passage(f"p{index:04d}", " ".join(paragraph.split()))
        if not known & runs(passage.text):
            found.append(passage)
    return tuple(found)


def runs(text: str) -> set[tuple[str, ...]]:
    """All runs of ``SHARED_WORDS`` words, in lower case and without punctuation."""
    words = re.findall(r"[a-z0-9']+", text.lower())
    return {tuple(words[start : start + SHARED_WORDS]) for start in range(len(words) - SHARED_WORDS + 1)}


def number(name: str, below: int) -> int:
    """A number in ``[0, below)`` that depends on the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % below


def shuffled(name: str, values: Sequence[T]) -> list[T]:
    """The values in an order that depends on the name alone."""
    order = sorted(range(len(values)), key=lambda index: hashlib.sha256(f"{name} {index}".encode()).digest())
    return [values[index] for index in order]


def evenly(values: Sequence[T], count: int) -> list[T]:
    """So many of the values, spread evenly over all of them.

    Raises:
        ValueError: there are not enough.
    """
    if len(values) < count:
        raise ValueError(f"{len(values)} candidates for {count} items")
    return [values[index * len(values) // count] for index in range(count)]
