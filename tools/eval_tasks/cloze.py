"""Last word of a passage, after LAMBADA (Paperno et al. 2016).

The word has three letters or more and occurs earlier in the passage, as most of LAMBADA's do, so that the context
helps. No word is wanted more than ``MAX_OF_A_WORD`` times: else a fifth of the answers would be "the". Where a
passage has several items, their contexts overlap; the passage is their cluster.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from .passages import evenly, passages

COUNT = 2600
CONTEXT_WORDS = 64
MIN_CONTEXT_WORDS = 24
APART_WORDS = 8
MAX_OF_A_WORD = 100


def items() -> list[dict[str, Any]]:
    found = [item for passage in passages() for item in _candidates(passage.name, passage.words)]
    times = Counter(item["target"].lower() for item in found)
    kept, seen = [], Counter[str]()
    for item in found:
        word = item["target"].lower()
        seen[word] += 1
        # of a frequent word, MAX_OF_A_WORD spread over the text
        before, now = (
            (n * MAX_OF_A_WORD) // max(times[word], MAX_OF_A_WORD) for n in (seen[word] - 1, seen[word])
        )
        if now > before:
            kept.append(item)
    return evenly(kept, COUNT)


def _candidates(name: str, words: list[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    last = -APART_WORDS
    for index in range(MIN_CONTEXT_WORDS, len(words)):
        context = words[max(0, index - CONTEXT_WORDS) : index]
        target = re.match(r"[A-Za-z]{3,}(?![\w'-])", words[index])
        if index - last < APART_WORDS or not target or target[0].lower() not in set(map(_plain, context)):
            continue
        last = index
        item = {"id": f"{name}-{index}", "cluster": name, "context": " ".join(context), "target": target[0]}
        found.append(item)
    return found


def _plain(word: str) -> str:
    return re.sub(r"^\W+|\W+$", "", word).lower()
