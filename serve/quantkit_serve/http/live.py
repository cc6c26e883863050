"""What the page for people shows, from the engine's figures: one JSON document, asked for once a second or so."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from typing_extensions import TypedDict

from .context import Context

MAX_CELLS = 2048  # of the page map; more would neither be seen nor be cheap to send


class PageMap(TypedDict):
    """``cells``: index into ``owners`` of each run of ``per_cell`` pages, -1 if all are free."""

    count: int
    per_cell: int
    owners: list[str]
    cells: list[int]


class Live(TypedDict):
    model: str
    is_ok: bool
    is_draining: bool
    reason: str | None
    has_tags: bool
    figures: dict[str, Any]
    pages: PageMap
    steps: list[tuple[float, float, str, int, int]]


def page_map(count: int, pages: dict[int, str], max_cells: int = MAX_CELLS) -> PageMap:
    """A cell shows the owner of one of its pages, and quarantined ones before any other."""
    per_cell = max(-(-count // max_cells), 1)
    cells = [-1] * -(-count // per_cell)
    owners: dict[str, int] = {}
    for page, owner in pages.items():
        cell = page // per_cell
        if cell < len(cells) and (cells[cell] < 0 or owner == "quarantined"):
            cells[cell] = owners.setdefault(owner, len(owners))
    return {"count": count, "per_cell": per_cell, "owners": list(owners), "cells": cells}


def live(context: Context) -> Live:
    figures, health = context.service.figures(), context.service.health()
    shown = asdict(figures)
    pages, steps = shown.pop("pages"), shown.pop("steps")
    return {
        "model": context.names[0],
        "is_ok": health.is_ok,
        "is_draining": not context.gate.is_open,
        "reason": health.reason,
        "has_tags": context.service.config.cache.has_tags,
        "figures": shown,
        "pages": page_map(figures.num_pages, pages),
        "steps": list(steps),
    }
