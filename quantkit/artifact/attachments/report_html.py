"""report.html: one self-contained page, plots as inline SVG, no script, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from ...units import format_bytes
from .calibration_html import STYLE as CALIBRATION_STYLE
from .calibration_html import calibration_section, table
from .retries import count_by_way

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1b1f24;
background:#fff}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}table{border-collapse:collapse}
td,th{padding:.2rem .8rem .2rem 0;
text-align:left;border-bottom:1px solid #d8dee4}td.n{text-align:right;font-variant-numeric:tabular-nums}
code{font-size:.9em}svg{max-width:100%;height:auto}svg text{fill:currentColor;font:11px system-ui,sans-serif}
.bar{fill:#2f6fde}.max{stroke:#c2410c;stroke-width:2}.grid{stroke:#d8dee4}
@media(prefers-color-scheme:dark){body{color:#e6edf3;background:#0d1117}td,th{border-color:#30363d}.grid{stroke:#30363d}
.bar{fill:#6ea8fe}.max{stroke:#fb923c}}
"""
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 880, 260, 56, 44, 12
_TICKS = 4
_NAMES = 12  # of a layer's retried weights; report.json has all


def render_html(report: Mapping[str, Any]) -> bytes:
    """The page for what ``report.build_report`` returns."""
    title = f"quantkit report: {report['source'] or report['family']}"
    calibrated = calibration_section(report)
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>{escape(title)}</title><style>{STYLE}{CALIBRATION_STYLE if calibrated else ''}</style>"
        f"<h1>{escape(title)}</h1>",
        f"<p>pair <code>{escape(report['pair_id'][:16])}</code></p>",
        _sizes(report["sizes"]),
        *_amendments(report.get("amendments", ())),
        *_retried(report.get("exceptions", {}).get("retried")),
    ]
    if calibrated:
        parts.append(calibrated)
    for view, errors in sorted(report["errors"].items()):
        parts.append(_view_section(view, errors))
    if not report["errors"]:
        parts.append("<p>No tensor was rounded: both views hold the publisher's numbers.</p>")
    return "\n".join(parts).encode() + b"\n"


def _sizes(sizes: Mapping[str, int]) -> str:
    rows = "".join(
        f"<tr><td>{escape(view)}</td><td class=n>{escape(format_bytes(size))}</td></tr>"
        for view, size in sorted(sizes.items())
    )
    return f"<table><tr><th>view</th><th>tensor data</th></tr>{rows}</table>"


def _amendments(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Layers that a quality budget left unquantized."""
    if not found:
        return
    yield f"<h2>Layers kept by the quality budget: {len(found):,}</h2>"
    columns = ("layer", ">weights over the limit", "worst", ">relative error", ">limit")
    rows = (
        [
            str(a["layer"]), f"{a['over_limit']:,} of {a['weights']:,}",
            f"<code>{escape(a['worst']['tensor'])}</code>", f"{a['worst']['relative_error']:.4%}",
            f"{a['worst']['limit']:.4%}",
        ]
        for a in found
    )  # fmt: skip
    yield table(columns, rows, len(found))


def _retried(layers: Mapping[str, Mapping[str, list[str]]] | None) -> Iterator[str]:
    """Weights that a quality budget had tried again; None: it does not ask for it."""
    if layers is None:
        return
    total = sum(len(names) for ways in layers.values() for names in ways.values())
    yield f"<h2>Retried under the quality budget: {total:,} weights</h2>"
    if not total:
        return
    yield f"<p>{escape(count_by_way(layers))}.</p>"
    rows = []
    for layer, ways in layers.items():
        names = [f"{name} ({way})" for way, found in ways.items() for name in found]
        shown = "<br>".join(f"<code>{escape(name)}</code>" for name in names[:_NAMES])
        more = f"<br>{len(names) - _NAMES:,} more in report.json" if len(names) > _NAMES else ""
        rows.append([escape(layer), f"{len(names):,}", shown + more])
    yield table(("layer", ">weights", "retry"), rows, len(rows), most=len(rows))


def _view_section(view: str, errors: Mapping[str, Any]) -> str:
    total = errors["all"]
    return (
        f"<h2>{escape(view)}: {total['weights']} weights rounded</h2>"
        f"<p>Relative error (root of squared differences over squared weights): {total['rms']:.4%} in the mean, "
        f"{total['max']:.4%} at most. Bars are means, marks the largest weight.</p>"
        f"<h2>Error by layer</h2>{bar_chart(errors['by_layer'], 'layer')}"
        f"<h2>Error by projection</h2>{bar_chart(errors['by_projection'], 'projection')}"
        f"<h2>Largest errors</h2>{_worst(errors['worst'])}"
    )


def _worst(worst: list[Mapping[str, Any]]) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(w['tensor'])}</code></td><td class=n>{w['relative_error']:.4%}</td></tr>"
        for w in worst
    )
    return f"<table><tr><th>tensor</th><th>relative error</th></tr>{rows}</table>"


def bar_chart(table: Mapping[str, Mapping[str, float]], axis: str) -> str:
    """Inline SVG: one bar (rms) and one mark (max) per key, with a title for pointers and screen readers."""
    top = max((row["max"] for row in table.values()), default=0.0) or 1.0
    plot_width, plot_height = _WIDTH - _LEFT, _HEIGHT - _BOTTOM - _TOP
    step = plot_width / max(len(table), 1)
    every = max(1, round(len(table) * 28 / plot_width)) if all(k.isdecimal() for k in table) else 1
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="relative error by {escape(axis)}">',
        *(_grid_line(top, tick, plot_height) for tick in range(_TICKS + 1)),
    ]
    for number, (key, row) in enumerate(table.items()):
        left, width = _LEFT + number * step + 0.12 * step, 0.76 * step
        bar, mark = (plot_height * row[kind] / top for kind in ("rms", "max"))
        say = f"{axis} {key}: mean {row['rms']:.4%}, largest {row['max']:.4%}, {row['weights']} weights"
        base = _TOP + plot_height
        parts.append(
            f'<g><title>{escape(say)}</title><rect class="bar" x="{left:.1f}" y="{base - bar:.1f}" '
            f'width="{width:.1f}" height="{bar:.1f}"/><line class="max" x1="{left:.1f}" x2="{left + width:.1f}" '
            f'y1="{base - mark:.1f}" y2="{base - mark:.1f}"/></g>'
        )
        if number % every == 0:
            middle = left + width / 2
            parts.append(f'<text x="{middle:.1f}" y="{base + 16}" text-anchor="middle">{escape(key)}</text>')
    parts.append(
        f'<text x="{_LEFT + plot_width / 2:.0f}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(axis)}</text>'
    )
    return "".join(parts) + "</svg>"


def _grid_line(top: float, tick: int, plot_height: int) -> str:
    height = _TOP + plot_height - plot_height * tick / _TICKS
    return (
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH}" y1="{height:.1f}" y2="{height:.1f}"/>'
        f'<text x="{_LEFT - 6}" y="{height + 4:.1f}" text-anchor="end">{top * tick / _TICKS:.2%}</text>'
    )
