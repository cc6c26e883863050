"""Answers as JSON by a schema: three questions about a passage whose right answers the passage itself gives.

The texts of an answer have no length limit in the schemas, so that an answer can also fail: by going on and on.
"""

from __future__ import annotations

import re
from typing import Any

from .passages import Passage, evenly, number, passages, shuffled

COUNT = 40  # of each question
TEXT_WORDS = 50
NAMES = (
    "David",
    "Moses",
    "Israel",
    "Jesus",
    "Peter",
    "Saul",
    "Elijah",
    "Pharaoh",
    "Judah",
    "Fanny",
    "Emma",
    "Egypt",
)


def items() -> list[dict[str, Any]]:
    found = []
    for name, of in (("verse", _verse), ("names", _names), ("ending", _ending)):
        able = [(passage, item) for passage in passages() if (item := of(passage)) is not None]
        for passage, item in evenly(able, COUNT):
            found.append({"id": f"{name}-{passage.name}", "cluster": passage.name} | item)
    return found


def _verse(passage: Passage) -> dict[str, Any] | None:
    """A comment on a verse: its number and first words."""
    start = re.match(r"Verse (\d+)\. (.+)", _text(passage))
    if not start:
        return None
    first = " ".join(start[2].split(" ")[:2])
    return _item(
        passage,
        '"verse" (a whole number) and "begins" (the two words after the number)',
        {"verse": {"type": "integer", "minimum": 1}, "begins": {"type": "string", "minLength": 1}},
        {"verse": int(start[1]), "begins": first},
    )


def _names(passage: Passage) -> dict[str, Any] | None:
    """Which of four names occur."""
    text = _text(passage)
    there = [name for name in NAMES if re.search(rf"\b{name}\b", text)]
    if not there:
        return None
    absent = [name for name in NAMES if name not in there]
    asked = shuffled(f"order {passage.name}", [*there[:2], *shuffled(passage.name, absent)[: 4 - len(there[:2])]])
    return _item(
        passage,
        f'"mentions" (those of {", ".join(asked)} that occur, in this order)',
        {"mentions": {"type": "array", "items": {"enum": asked}, "maxItems": 4}},
        {"mentions": [name for name in asked if name in there]},
    )


def _ending(passage: Passage) -> dict[str, Any] | None:
    """A question or not, and the last word."""
    sentence = passage.sentences[number(passage.name, len(passage.sentences))]
    words = sentence.split(" ")
    if not 6 <= len(words) <= 30 or not re.fullmatch(r"[A-Za-z]+[.?!]", words[-1]):
        return None
    return _item(
        Passage(passage.name, sentence),
        '"mark" (the last character) and "word" (the last word, without the mark)',
        {"mark": {"enum": [".", "?", "!"]}, "word": {"type": "string", "minLength": 1}},
        {"mark": words[-1][-1], "word": words[-1][:-1]},
    )


def _item(passage: Passage, fields: str, properties: dict[str, Any], target: dict[str, Any]) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    prompt = f"Text: {_text(passage)}\n\nThe text as a JSON object with {fields}, on one line:\n"
    return {"prompt": prompt, "json_schema": schema, "target": target}


def _text(passage: Passage) -> str:
    return " ".join(passage.words[:TEXT_WORDS])
