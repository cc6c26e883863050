"""The sweep as one standalone SVG: throughput, time to first token, time per output token, end to end.

Written by hand, since four line charts need no plotting library. Levels stand side by side at equal distances,
since they are usually doubled; every axis starts at 0. Colours are told apart by people who see them differently
(Okabe and Ito, 2008), and each line has its own marks as well.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from .result import LevelResult, LoadResult, Summary

_WIDTH, _HEIGHT = 460, 260  # of a panel
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 52, 40
_HEAD = 40
_TICKS = 4
_STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#1b1f24}.t{font-size:13px;font-weight:600}"
    ".h{font-size:15px;font-weight:600}.g{stroke:#d8dee4}.l{fill:none;stroke-width:2}"
)
_COLOURS = ("#0072b2", "#d55e00", "#009e73")
_MARKS = ("M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0", "M-3.5 -3.5h7v7h-7z", "M0 -4.5l4.5 8h-9z")
Lines = Mapping[str, Sequence[float | None]]


def render_svg(result: LoadResult) -> str:
    """The document; ends with a line break."""
    panels = [
        ("tokens per second", {
            "output": [level.output_throughput for level in result.levels],
            "prompt and output": [level.total_throughput for level in result.levels],
        }),
        ("time to first token, ms", _summaries([level.ttft_ms for level in result.levels])),
        ("time per output token, ms", _summaries([level.tpot_ms for level in result.levels])),
        ("end to end, ms", _summaries([level.e2e_ms for level in result.levels])),
    ]  # fmt: skip
    labels = [_label(level) for level in result.levels]
    axis = "requests per second" if result.levels[0].rate is not None else "requests at a time"
    drawn = [
        f'<g transform="translate({number % 2 * _WIDTH} {_HEAD + number // 2 * _HEIGHT})">'
        f"{_panel(title, lines, labels, axis)}</g>"
        for number, (title, lines) in enumerate(panels)
    ]
    width, height = 2 * _WIDTH, _HEAD + 2 * _HEIGHT
    lengths = f"{result.input_len} tokens in, {result.output_len} out"
    title = f"{result.model}: {lengths}, {result.num_prompts} requests a level"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img"><title>{escape(title)}</title><style>{_STYLE}</style>'
        '<rect width="100%" height="100%" fill="#fff"/>'
        f'<text class="h" x="{_LEFT}" y="25">{escape(title)}</text>{"".join(drawn)}</svg>\n'
    )


def write_svg(result: LoadResult, path: str | os.PathLike[str]) -> None:
    """
    Raises:
        OSError: it can't be written.
    """
    Path(path).write_text(render_svg(result), encoding="utf-8")


def _label(level: LevelResult) -> str:
    failed = f" ({level.failed} failed)" if level.failed else ""
    return f"{level.concurrency if level.rate is None else f'{level.rate:g}'}{failed}"


def _summaries(found: Sequence[Summary | None]) -> Lines:
    return {
        name: [None if summary is None else getattr(summary, field) for summary in found]
        for name, field in (("median", "median"), ("95 %", "p95"), ("99 %", "p99"))
    }


def _panel(title: str, lines: Lines, labels: Sequence[str], axis: str) -> str:
    step, top = scale(max((value for line in lines.values() for value in line if value is not None), default=0.0))
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    distance = (right - _LEFT) / len(labels)

    def x(place: int) -> float:
        return _LEFT + (place + 0.5) * distance

    def y(value: float) -> float:
        return bottom - value / top * (bottom - _TOP)

    parts = [f'<text class="t" x="{_LEFT}" y="16">{escape(title)}</text>', _legend(list(lines))]
    for number in range(round(top / step) + 1):
        at = y(number * step)
        parts.append(f'<path class="g" d="M{_LEFT} {at:.1f}H{right}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{number * step:,.6g}</text>')
    for place, label in enumerate(labels):
        parts.append(f'<text x="{x(place):.1f}" y="{bottom + 16}" text-anchor="middle">{escape(label)}</text>')
    parts.append(f'<text x="{(_LEFT + right) / 2}" y="{bottom + 32}" text-anchor="middle">{escape(axis)}</text>')
    for number, (name, line) in enumerate(lines.items()):
        points = [(x(place), y(value), value) for place, value in enumerate(line) if value is not None]
        path = "L".join(f"{px:.1f} {py:.1f}" for px, py, _ in points)
        colour = _COLOURS[number]
        parts.append(f'<path class="l" stroke="{colour}" d="M{path}"/>' if points else "")
        parts += [
            f'<path fill="{colour}" transform="translate({px:.1f} {py:.1f})" d="{_MARKS[number]}">'
            f"<title>{escape(name)}: {value:,.4g}</title></path>"
            for px, py, value in points
        ]
    return "".join(parts)


def _legend(names: Sequence[str]) -> str:
    parts, at = [], float(_LEFT + 4)
    for number, name in enumerate(names):
        parts.append(f'<path fill="{_COLOURS[number]}" transform="translate({at} 32)" d="{_MARKS[number]}"/>')
        parts.append(f'<text x="{at + 9}" y="36">{escape(name)}</text>')
        at += 26 + 6.5 * len(name)
    return "".join(parts)


def scale(most: float) -> tuple[float, float]:
    """Distance of the ticks, 1, 2 or 5 times a power of ten, and the end of an axis that holds ``most``."""
    if not most > 0:
        return 1.0, 1.0
    rough = most / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return step, math.ceil(most / step * (1 - 1e-9)) * step
