"""Recall over a distance: which of four sentences stood at the beginning of the context.

The context is a passage that holds the true sentence within its first words, continued with other passages up to a
given length; then the sentence comes again, or one of three from other passages, about as long. A model that can
look back copies it; one that can't is left with what suits the subject, which wears off with the distance. Nothing
but the context tells the four apart: the wrong ones are sentences from the beginning of their passages, too.

Left out: random keys and numbers, as in needle tests. The bundled models are too small to copy those at all, so
that nothing could be seen of a cache.
"""

from __future__ import annotations

from typing import Any

from .next_sentence import choices
from .passages import Passage, evenly, passages, shuffled

LENGTHS = (100, 200, 400)  # words of the context
LONG = 1000
COUNT = 90  # for each length
LONG_COUNT = 40
FIRST_WORDS = 20  # the true sentence begins within these
WORDS = range(8, 17)


def items() -> list[dict[str, Any]]:
    return [item for length in LENGTHS for item in _of_length(length, COUNT)]


def long_items() -> list[dict[str, Any]]:
    return _of_length(LONG, LONG_COUNT)


def _of_length(length: int, count: int) -> list[dict[str, Any]]:
    keys, found = _keys(), []
    for passage, key in evenly(keys, count):
        name = f"{passage.name}-{length}"
        words = passage.words
        for other in shuffled(name, passages()):
            if len(words) >= length:
                break
            if other != passage:
                words = words + other.words
        context = " ".join(words[:length])
        item = {"id": name, "cluster": passage.name, "context": context}
        found.append(item | choices(name, key, passage, context, keys))
    return found


def _keys() -> list[tuple[Passage, str]]:
    """The passages that have a sentence of the right length early, and the first such sentence."""
    found = []
    for passage in passages():
        before = 0
        for sentence in passage.sentences:
            if before <= FIRST_WORDS and len(sentence.split(" ")) in WORDS and len(passage.words) >= LENGTHS[0]:
                found.append((passage, sentence))
                break
            before += len(sentence.split(" "))
    return found
