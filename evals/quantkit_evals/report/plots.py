"""Values with intervals (a forest plot) and flips (bars to both sides), as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..comparison import Verdict
from .svg import WIDTH, Scale, across, line, mark, picture, safe, words, words_width

_ROW, _TOP, _BOTTOM = 26, 8, 40
_WIDEST = 300  # px of the names at the left, and of the numbers at the right
_GAP = 10
_SHAPES = {None: "circle", Verdict.PASS: "circle", Verdict.FAIL: "cross", Verdict.UNDECIDED: "diamond"}


@dataclass(frozen=True, slots=True)
class Estimate:
    """A row of a forest plot.

    Attributes:
        label: what it is.
        value, low, high: with its interval; any may be NaN and is then left out.
        limits: marked in this row.
        verdict: about the limit; None: nothing was held against it.
        note: the numbers in words.
    """

    label: str
    value: float
    low: float
    high: float
    limits: tuple[float, ...]
    verdict: Verdict | None
    note: str


@dataclass(frozen=True, slots=True)
class Change:
    """A row of bars: items lost and gained."""

    label: str
    lost: int
    gained: int


def forest(key: str, title: str, axis: str, rows: Sequence[Estimate], *, zero: float | None, sign: bool) -> str:
    """Values and their intervals under each other.

    Args:
        key: unique in the page.
        axis: what the values are, with their unit.
        zero: where there is no difference, marked through all rows; None: there is no such value.
        sign: write ``+`` on the axis.
    """
    left, right = _sides([row.label for row in rows], [row.note for row in rows])
    bottom = _TOP + _ROW * len(rows)
    known = [v for row in rows for v in (row.value, row.low, row.high, *row.limits)]
    scale = Scale.of(known if zero is None else [*known, zero], left, right)
    parts = list(across(scale, _TOP, bottom, axis, sign=sign))
    if zero is not None:
        parts.append(line("zero", scale.at(zero), _TOP, scale.at(zero), bottom))
    for number, row in enumerate(rows):
        parts += _estimate(row, scale, _TOP + _ROW * (number + 0.5))
    said = "; ".join(f"{row.label}: {row.note}{_outcome(row.verdict)}" for row in rows)
    return picture(key, title, f"{axis}. {said}", bottom + _BOTTOM, parts)


def _sides(labels: Sequence[str], notes: Sequence[str]) -> tuple[float, float]:
    """Where the plot begins and ends between names and numbers."""
    left, right = (min(_WIDEST, max(map(words_width, texts))) for texts in (labels, notes))
    return left + _GAP, WIDTH - right - _GAP


def _outcome(verdict: Verdict | None) -> str:
    return "" if verdict is None else f", {verdict.value}"


def _estimate(row: Estimate, scale: Scale, y: float) -> Iterator[str]:
    kind = "none" if row.verdict is None else row.verdict.value
    yield f"<g><title>{safe(f'{row.label}: {row.note}{_outcome(row.verdict)}')}</title>"
    yield words(scale.start - _GAP, y + 4, row.label, "end", width=scale.start - _GAP)
    for limit in row.limits:
        yield line("limit", scale.at(limit), y - _ROW / 2 + 2, scale.at(limit), y + _ROW / 2 - 2)
    if math.isfinite(row.low) and math.isfinite(row.high):
        low, high = scale.at(row.low), scale.at(row.high)
        yield line(f"v {kind}", low, y, high, y)
        yield line(f"v {kind}", low, y - 4, low, y + 4) + line(f"v {kind}", high, y - 4, high, y + 4)
    if math.isfinite(row.value):
        yield mark(f"v {kind}", _SHAPES[row.verdict], scale.at(row.value), y)
    yield words(scale.stop + _GAP, y + 4, row.note, width=WIDTH - scale.stop - _GAP)
    yield "</g>"


def flips(key: str, title: str, rows: Sequence[Change]) -> str:
    """Items lost to the left, gained to the right."""
    left, right = _sides([row.label for row in rows], [_count(row) for row in rows])
    bottom = _TOP + _ROW * len(rows)
    most = max(1, *(max(row.lost, row.gained) for row in rows))
    scale = Scale.of([-most, most], left, right, count=6)
    parts = list(across(scale, _TOP, bottom, "items lost (left) and gained (right)"))
    for number, row in enumerate(rows):
        parts += _change(row, scale, _TOP + _ROW * (number + 0.5))
    parts.append(line("zero", scale.at(0), _TOP, scale.at(0), bottom))
    said = "; ".join(f"{row.label}: {_count(row)}" for row in rows)
    return picture(key, title, said, bottom + _BOTTOM, parts)


def _count(row: Change) -> str:
    return f"{row.lost:,} lost, {row.gained:,} gained"


def _change(row: Change, scale: Scale, y: float) -> Iterator[str]:
    yield f"<g><title>{safe(f'{row.label}: {_count(row)}')}</title>"
    yield words(scale.start - _GAP, y + 4, row.label, "end", width=scale.start - _GAP)
    zero = scale.at(0)
    for kind, end in (("lost", scale.at(-row.lost)), ("gained", scale.at(row.gained))):
        x, width = min(zero, end), abs(end - zero)
        yield f'<rect class="{kind}" x="{x:.1f}" y="{y - 7:.1f}" width="{width:.1f}" height="14"/>'
    yield words(scale.stop + _GAP, y + 4, _count(row), width=WIDTH - scale.stop - _GAP)
    yield "</g>"
