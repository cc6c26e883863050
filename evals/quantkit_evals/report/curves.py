"""Means along something (KL by position, by length of context) as SVG: a line per candidate, bars of one error."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from ..run import CurvePoint
from .svg import MARKS, WIDTH, Scale, across, line, mark, picture, safe, upwards, words

COLOURS = 6  # classes s0 to s5 of the page's style
_LEFT, _TOP, _PLOT, _BOTTOM, _LEGEND = 72, 8, 220, 40, 18


@dataclass(frozen=True, slots=True)
class Series:
    """One candidate's curve; points whose value is not finite are gaps."""

    label: str
    points: tuple[CurvePoint, ...]


def curves(key: str, title: str, across_is: str, up_is: str, series: Sequence[Series]) -> str:
    """Lines through the middles of the points' ranges; upwards from 0, so that heights compare.

    Args:
        key: unique in the page.
        across_is, up_is: what the axes are, with units.
    """
    points = [point for one in series for point in one.points]
    right, bottom = WIDTH - 12.0, float(_TOP + _PLOT)
    x = Scale.of([v for p in points for v in (p.start, p.stop)], _LEFT, right, count=8)
    y = Scale.of([0.0, *(v for p in points for v in (p.value, p.value + p.stderr))], bottom, _TOP)
    parts = [*upwards(y, _LEFT, right), *across(x, _TOP, bottom, across_is)]
    for number, one in enumerate(series):
        parts += _curve(number, one, x, y)
        row = bottom + _BOTTOM + _LEGEND * (number + 0.5)
        parts.append(line(_style(number), _LEFT, row, _LEFT + 28, row))
        parts.append(mark(_style(number), MARKS[number % len(MARKS)], _LEFT + 14, row))
        parts.append(words(_LEFT + 36, row + 4, one.label, width=WIDTH - _LEFT - 40))
    said = "; ".join(f"{one.label}: {_range(one)}" for one in series)
    height = bottom + _BOTTOM + _LEGEND * len(series) + 6
    return picture(key, title, f"{up_is} by {across_is}. {said}", height, parts)


def say(point: CurvePoint) -> str:
    """``64 to 127``."""
    return f"{point.start:,}" if point.stop - point.start <= 1 else f"{point.start:,} to {point.stop - 1:,}"


def _range(series: Series) -> str:
    values = [point.value for point in series.points if math.isfinite(point.value)]
    return f"{min(values):.3g} to {max(values):.3g}" if values else "no finite value"


def _style(number: int) -> str:
    """Colour and, after all colours and marks, another dash."""
    return f"s s{number % COLOURS} d{number // COLOURS % 2}"


def _middle(point: CurvePoint) -> float:
    return (point.start + max(point.stop - 1, point.start)) / 2


def _curve(number: int, series: Series, x: Scale, y: Scale) -> Iterator[str]:
    for is_known, run in groupby(series.points, key=lambda point: math.isfinite(point.value)):
        if not is_known:
            continue
        found = list(run)
        places = [(x.at(_middle(point)), y.at(point.value)) for point in found]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        yield f'<polyline class="{_style(number)}" points="{path}"/>'
        for point, (a, b) in zip(found, places, strict=True):
            says = f"{series.label}, {say(point)}: {point.value:.4g} ± {point.stderr:.2g}"
            says = says if math.isfinite(point.stderr) else f"{series.label}, {say(point)}: {point.value:.4g}"
            yield f"<g><title>{safe(says)}</title>"
            if math.isfinite(point.stderr):
                low, high = max(point.value - point.stderr, y.low), point.value + point.stderr
                yield line(_style(number), a, y.at(low), a, y.at(high))
            yield mark(_style(number), MARKS[number % len(MARKS)], a, b, 3.0) + "</g>"
