"""Perplexity: whole passages, each a document of its own."""

from __future__ import annotations

from typing import Any

from .passages import evenly, passages

COUNT = 128
MIN_WORDS = 60


def items() -> list[dict[str, Any]]:
    long = [passage for passage in passages() if len(passage.words) >= MIN_WORDS]
    return [{"id": passage.name, "text": passage.text} for passage in evenly(long, COUNT)]
