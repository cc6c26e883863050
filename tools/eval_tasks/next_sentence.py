"""Which sentence goes on: the true one, or one of three from other passages, about as long.

The wrong ones are of the same kind as true ones (a sentence within a passage, not its first): nothing about a
sentence itself tells which is right.
"""

from __future__ import annotations

from typing import Any

from .passages import Passage, evenly, number, passages, shuffled

COUNT = 400
MIN_CONTEXT_WORDS = 30
CONTEXT_WORDS = 80
WORDS = range(6, 17)  # of a choice
CHOICES = 4
LONGER = 0.15  # characters that a choice may be longer or shorter than the true one


def items() -> list[dict[str, Any]]:
    found = []
    for passage in passages():
        for index, sentence in enumerate(passage.sentences):
            before = " ".join(passage.sentences[:index]).split(" ")
            if len(before) >= MIN_CONTEXT_WORDS and len(sentence.split(" ")) in WORDS:
                found.append((f"{passage.name}-{index}", passage, before[-CONTEXT_WORDS:], sentence))
    sentences = [(passage, sentence) for _, passage, _, sentence in found]
    return [
        {"id": name, "cluster": passage.name, "context": " ".join(context)}
        | choices(name, sentence, passage, " ".join(context), sentences)
        for name, passage, context, sentence in evenly(found, COUNT)
    ]


def choices(
    name: str, true: str, passage: Passage, context: str, sentences: list[tuple[Passage, str]]
) -> dict[str, Any]:
    """``choices`` and ``answer``: the true sentence among others of about its length.

    The others are from other passages than the true one, and do not occur in the context.
    """
    alike = {
        sentence: None
        for other, sentence in sentences
        if other != passage and sentence != true and abs(len(sentence) - len(true)) <= LONGER * len(true)
    }
    shown = [sentence for sentence in shuffled(name, list(alike)) if sentence not in context][: CHOICES - 1]
    if len(shown) < CHOICES - 1:
        raise ValueError(f"{name}: too few sentences of its length")
    answer = number(f"{name} answer", CHOICES)
    return {"choices": [*shown[:answer], true, *shown[answer:]], "answer": answer}
