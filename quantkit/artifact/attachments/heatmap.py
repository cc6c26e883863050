"""A heat map as inline SVG: layers down, experts across, a few steps of colour with their numbers in the legend.

Colours go from light to dark in even steps of lightness, so that they order the same way on paper, for
colour-blind readers and in a dark window (the map stands on white there too). All cells of one colour are one
path and equal neighbours one rectangle: 256 experts by 78 layers stay some hundred kB. A title per layer instead
of one per cell keeps it so; the numbers of every expert are in report.json.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby, pairwise

# Lightness falls evenly (CIE L* about 91 to 14), hue turns from yellow to violet.
PALETTE = ("#f7e49b", "#f3c06f", "#e89a5c", "#d3735c", "#b14f69", "#83356f", "#521f63", "#25104a")
_WIDTH, _LEFT, _TOP = 880, 56, 4
_LARGEST, _LOWEST, _HIGHEST = 24.0, 4.0, 18.0  # cell: widest; least and greatest height
_LABEL = 13  # height that a label needs
_TICK = 34  # width that a tick needs


@dataclass(frozen=True, slots=True)
class Steps:
    """Colours by value: below ``edges[0]`` the first, from ``edges[-1]`` on the last.

    Attributes:
        edges: ascending.
        colours: one more than edges.
        labels: what the legend says of each colour.
    """

    edges: Sequence[float]
    colours: Sequence[str]
    labels: Sequence[str]

    def of(self, value: float) -> int:
        """Number of the colour."""
        return bisect_right(self.edges, value)


def error_steps(values: Sequence[float]) -> Steps:
    """Even steps between the least and the largest error, darker is worse."""
    low, high = min(values), max(values)
    if not high > low:
        return Steps((), PALETTE[:1], (f"{low:.3%}",))
    count = len(PALETTE)
    bounds = [low + (high - low) * step / count for step in range(count + 1)]
    labels = [f"{a:.2%} to {b:.2%}" for a, b in pairwise(bounds)]
    return Steps(bounds[1:-1], PALETTE, labels)


def token_steps(min_tokens: int) -> Steps:
    """Steps about ``min_tokens``, darker is fewer; the three dark ones are starved experts."""
    least = max(min_tokens, 8)  # so that all steps differ
    edges = (1, least // 4, least, 4 * least, 16 * least)
    labels = ["none", *(f"{a:,} to {b - 1:,}" for a, b in pairwise(edges))]
    colours = (PALETTE[7], PALETTE[6], PALETTE[4], PALETTE[2], PALETTE[1], PALETTE[0])
    return Steps(edges, colours, [*labels, f"{edges[-1]:,} and more"])


def heat_map(rows: Mapping[str, Mapping[int, float]], steps: Steps, says: Mapping[str, str], title: str) -> str:
    """The map and its legend.

    Args:
        rows: value by expert, by layer. An expert without a value stays white.
        steps: colours.
        says: tooltip of each layer.
        title: what is shown, for screen readers.
    """
    columns = 1 + max((expert for row in rows.values() for expert in row), default=0)
    width = min(_LARGEST, (_WIDTH - _LEFT - 1) / columns)
    height = min(_HIGHEST, max(_LOWEST, width))
    right, bottom = _LEFT + width * columns, _TOP + height * len(rows)
    paths: list[list[str]] = [[] for _ in steps.colours]
    overlay = []
    for number, (layer, row) in enumerate(rows.items()):
        y = _TOP + number * height
        colours = [steps.of(row[expert]) if expert in row else None for expert in range(columns)]
        for colour, run in groupby(range(columns), key=lambda expert: colours[expert]):
            cells = list(run)
            if colour is not None:
                w = len(cells) * width
                paths[colour].append(f"M{_LEFT + cells[0] * width:.2f} {y:.2f}h{w:.2f}v{height:.2f}h-{w:.2f}z")
        overlay.append(
            f'<rect x="{_LEFT}" y="{y:.2f}" width="{right - _LEFT:.2f}" height="{height:.2f}" fill-opacity="0">'
            f"<title>{escape(says[layer])}</title></rect>"
        )
    cells_svg = "".join(
        f'<path fill="{colour}" d="{"".join(path)}"/>'
        for colour, path in zip(steps.colours, paths, strict=True) if path
    )  # fmt: skip
    return (
        f'<svg viewBox="0 0 {_WIDTH} {bottom + 36:.0f}" role="img" aria-label="{escape(title)}">'
        f'<rect class="paper" x="{_LEFT - 1}" y="{_TOP - 1}" width="{right - _LEFT + 2:.2f}" '
        f'height="{bottom - _TOP + 2:.2f}"/><g shape-rendering="crispEdges">{cells_svg}</g>'
        f"{_labels(list(rows), columns, width, height)}{''.join(overlay)}</svg>{legend(steps)}"
    )


def legend(steps: Steps) -> str:
    """Colours with the values they stand for, and white."""
    items = [*zip(steps.colours, steps.labels, strict=True), ("#fff", "not calibrated")]
    return (
        '<p class="legend">'
        + " ".join(f'<span><i style="background:{colour}"></i>{escape(label)}</span>' for colour, label in items)
        + "</p>"
    )


def _labels(layers: Sequence[str], columns: int, width: float, height: float) -> str:
    bottom = _TOP + height * len(layers)
    every = -int(-_LABEL // height)
    parts = [
        f'<text x="{_LEFT - 6}" y="{_TOP + (n + 0.5) * height + 4:.1f}" text-anchor="end">{escape(layer)}</text>'
        for n, layer in enumerate(layers) if n % every == 0
    ]  # fmt: skip
    step = next(s for s in (1, 2, 4, 8, 16, 32, 64, 128, columns) if s * width >= _TICK or s >= columns)
    parts += [
        f'<text x="{_LEFT + (n + 0.5) * width:.1f}" y="{bottom + 15:.1f}" text-anchor="middle">{n}</text>'
        for n in range(0, columns, step)
    ]
    parts.append(f'<text x="{_LEFT}" y="{bottom + 31:.1f}">experts across, layers down</text>')
    return "".join(parts)
