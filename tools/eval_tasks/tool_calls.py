"""Calls of tools: three tools with typed arguments, a request, and the call that it asks for.

Words that requests are about come from the held-out text. The schema of an answer is any of the three calls with
arguments of its types: where it is enforced every finished answer is valid, and which tool and which arguments it
has is up to the model.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from .passages import number, passages, shuffled

COUNT = 120
STRING, INTEGER, BOOLEAN = {"type": "string", "minLength": 1}, {"type": "integer"}, {"type": "boolean"}
TOOLS: dict[str, dict[str, Any]] = {
    "read_verse": {"book": STRING, "verse": INTEGER},
    "count_word": {"word": STRING, "ignore_case": BOOLEAN},
    "write_letter": {"to": STRING, "about": STRING},
    "set_reminder": {"day": {"enum": ["Monday", "Wednesday", "Friday", "Sunday"]}, "note": STRING},
    "find_person": {"name": STRING},
    "convert": {"amount": INTEGER, "unit": {"enum": ["miles", "pounds", "hours"]}},
}


def items() -> list[dict[str, Any]]:
    words = _words()
    found = []
    for index in range(COUNT):
        name = f"call-{index:03d}"
        offered = shuffled(name, list(TOOLS))[:3]
        wanted = offered[number(f"{name} wanted", 3)]
        request, arguments = _request(wanted, name, words)
        lines = [f"- {tool}({', '.join(f'{k}: {_kind(v)}' for k, v in TOOLS[tool].items())})" for tool in offered]
        prompt = (
            "Tools:\n" + "\n".join(lines) + f'\n\nRequest: {request}\n\nThe call as {{"tool": NAME, "arguments": '
            "{...}}, on one line:\n"
        )
        found.append(
            {
                "id": name,
                "prompt": prompt,
                "json_schema": {"anyOf": [_call(tool) for tool in offered]},
                "target": {"tool": wanted, "arguments": arguments},
            }
        )
    return found


def _words() -> list[str]:
    """Names and longer words of the held-out text, the most frequent first."""
    counts = Counter(word for p in passages() for word in re.findall(r"(?<=[a-z] )[A-Za-z][a-z]{4,}\b", p.text))
    return [word for word, _ in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:400]]


def _request(tool: str, name: str, words: list[str]) -> tuple[str, dict[str, Any]]:
    capital, small = ([w for w in shuffled(name, words) if w[0].isupper() is upper] for upper in (True, False))
    count = 2 + number(f"{name} count", 40)
    if tool == "read_verse":
        return f"Read me verse {count} of {capital[0]}.", {"book": capital[0], "verse": count}
    if tool == "count_word":
        how = bool(number(f"{name} case", 2))
        asked = "in capitals or not" if how else "exactly as I write it"
        return f"How often does the word {small[0]} occur, {asked}?", {"word": small[0], "ignore_case": how}
    if tool == "write_letter":
        return f"Write to {capital[0]} about the {small[0]}.", {"to": capital[0], "about": f"the {small[0]}"}
    if tool == "set_reminder":
        day = TOOLS[tool]["day"]["enum"][count % 4]
        return f"On {day}, remind me of this: {small[0]} for {capital[0]}.", {
            "day": day, "note": f"{small[0]} for {capital[0]}",
        }  # fmt: skip
    if tool == "find_person":
        return f"Who is {capital[0]}?", {"name": capital[0]}
    unit = TOOLS[tool]["unit"]["enum"][count % 3]
    return f"What are {count} {unit} in other units?", {"amount": count, "unit": unit}


def _kind(schema: dict[str, Any]) -> str:
    return " or ".join(schema["enum"]) if "enum" in schema else str(schema["type"])


def _call(tool: str) -> dict[str, Any]:
    arguments = {
        "type": "object",
        "properties": TOOLS[tool],
        "required": list(TOOLS[tool]),
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": {"tool": {"const": tool}, "arguments": arguments},
        "required": ["tool", "arguments"],
        "additionalProperties": False,
    }
