"""What the plots are drawn with: scales with round ticks, and an SVG that says in words what it shows.

No script, no font, nothing loaded: a plot is its text in the page. Colours are classes of the page's style, so
that light and dark windows each have their own; nothing is told by colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape

from .text import one_line

WIDTH = 880
_CHARACTER = 6.3  # px of the 11 px system font on average


@dataclass(frozen=True, slots=True)
class Scale:
    """Values ``low`` to ``high`` on pixels ``start`` to ``stop`` (which may run backwards).

    Attributes:
        ticks: round values inside.
    """

    low: float
    high: float
    start: float
    stop: float
    ticks: tuple[float, ...]

    @staticmethod
    def of(values: Iterable[float], start: float, stop: float, *, count: int = 5) -> Scale:
        """A scale that holds all finite values, with a little room, from tick to tick."""
        finite = [value for value in values if math.isfinite(value)]
        low, high = min(finite, default=0.0), max(finite, default=1.0)
        if not high > low:
            spread = abs(low) * 0.1 or 1.0
            low, high = low - spread, high + spread
        step = _round_step((high - low) / count)
        first, last = math.floor(low / step), math.ceil(high / step)
        return Scale(first * step, last * step, start, stop, tuple(n * step for n in range(first, last + 1)))

    def at(self, value: float) -> float:
        return self.start + (self.stop - self.start) * (value - self.low) / (self.high - self.low)

    def label(self, tick: float, *, sign: bool = False) -> str:
        """A tick's value with as many digits as the step needs."""
        step = (self.high - self.low) / max(len(self.ticks) - 1, 1)
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        tick = 0.0 if abs(tick) < step / 2 else tick
        text = f"{tick:.{digits}f}" if digits <= 6 else f"{tick:.2g}"
        return f"+{text}" if sign and tick > 0 else text


def _round_step(step: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next((factor * power for factor in (1.0, 2.0, 5.0) if factor * power >= step * (1 - 1e-9)), 10 * power)


def picture(key: str, title: str, description: str, height: float, parts: Iterable[str]) -> str:
    """An SVG with a title and a description for who can't see it; ``key`` is unique in the page."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-labelledby="{key}-t {key}-d">'
        f'<title id="{key}-t">{safe(title)}</title><desc id="{key}-d">{safe(description)}</desc>'
        f"{''.join(parts)}</svg>"
    )


def safe(text: str) -> str:
    """Text of strangers as HTML and SVG can hold it."""
    return escape(one_line(text))


def words_width(text: str) -> float:
    """About the pixels that a text takes."""
    return _CHARACTER * (len(one_line(text)) + 1)


def words(x: float, y: float, text: str, anchor: str = "start", *, width: float = math.inf) -> str:
    """Text, cut to ``width`` px; then the whole of it is its title."""
    most = max(int(min(width, 1e6) / _CHARACTER), 4)
    shown = one_line(text)
    cut = shown if len(shown) <= most else shown[: most - 1] + "…"
    title = f"<title>{safe(text)}</title>" if cut is not shown else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{title}{escape(cut)}</text>'


def line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


MARKS = ("circle", "square", "diamond", "triangle")


def mark(kind: str, shape: str, x: float, y: float, size: float = 4.5) -> str:
    """A mark of one of the shapes ``MARKS``, or ``cross``."""
    if shape == "circle":
        return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}"/>'
    paths = {
        "square": ((-1, -1), (1, -1), (1, 1), (-1, 1)), "diamond": ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
        "triangle": ((0, -1.2), (1.2, 1), (-1.2, 1)),
    }  # fmt: skip
    if shape in paths:
        corners = " ".join(f"{x + size * dx:.1f},{y + size * dy:.1f}" for dx, dy in paths[shape])
        return f'<polygon class="{kind}" points="{corners}"/>'
    return line(kind, x - size, y - size, x + size, y + size) + line(kind, x - size, y + size, x + size, y - size)


def across(scale: Scale, top: float, bottom: float, caption: str, *, sign: bool = False) -> Iterator[str]:
    """Vertical grid lines, the values below, and what they are."""
    for tick in scale.ticks:
        x = scale.at(tick)
        yield line("grid", x, top, x, bottom)
        yield words(x, bottom + 15, scale.label(tick, sign=sign), "middle")
    yield words((scale.start + scale.stop) / 2, bottom + 32, caption, "middle")


def upwards(scale: Scale, left: float, right: float) -> Iterator[str]:
    """Horizontal grid lines with their values at the left."""
    for tick in scale.ticks:
        y = scale.at(tick)
        yield line("grid", left, y, right, y)
        yield words(left - 6, y + 4, scale.label(tick), "end")
