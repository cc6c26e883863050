"""What is asked: windows of the bundled text, or random tokens, all different from each other.

A prompt that a server has seen before is answered from its prefix cache, so no two prompts of a run start alike:
windows begin at different places of the text, whatever the level or the warm-up that they belong to.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from quantkit.errors import UsageError

DISTINCT = 16  # tokens after which two windows are sure to differ, smaller than any page


def windows(tokens: Sequence[int], length: int, rng: random.Random) -> Iterator[tuple[int, ...]]:
    """Windows of a tokenized text, in random order; ends when the text has no new one.

    Raises:
        UsageError: the text is shorter than one window.
    """
    if len(tokens) < length:
        raise UsageError(
            f"is {length}, but the bundled text has {len(tokens)} tokens", where="--input-len",
            hint="Use --prompts random.",
        )  # fmt: skip
    places = list(range(len(tokens) - length + 1))
    rng.shuffle(places)
    seen: set[tuple[int, ...]] = set()
    for place in places:
        start = tuple(tokens[place : place + min(length, DISTINCT)])
        if start not in seen:
            seen.add(start)
            yield tuple(tokens[place : place + length])


def random_tokens(vocab_size: int, length: int, rng: random.Random) -> Iterator[tuple[int, ...]]:
    """Token ids drawn evenly; without end."""
    while True:
        yield tuple(rng.randrange(vocab_size) for _ in range(length))
