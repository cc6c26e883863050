"""The part of report.html that only calibrated conversions have: heat maps, starved experts, exceptions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from statistics import median
from typing import Any

from .heatmap import error_steps, heat_map, token_steps

ROWS = 30  # of a table; report.json has all

ROUTE_ALL = "route-all: every expert learned from all tokens of its layer, so none is starved."

STYLE = """
th.n{text-align:right}
.paper{fill:#fff;stroke:#8c959f}.legend span{white-space:nowrap;margin-right:1rem;font-size:.85rem}
.legend i{display:inline-block;width:.9rem;height:.9rem;margin-right:.35rem;border:1px solid #8c959f;
vertical-align:-.1rem}
"""


def calibration_section(report: Mapping[str, Any]) -> str:
    """HTML for the ``calibration`` and ``exceptions`` of a report; the empty string where there are none."""
    layers = report.get("calibration")
    if not layers:
        return ""
    settings = report["recipe"].get("calibration") or {}
    exceptions = report["exceptions"]
    is_route_all = report.get("route_all", False)
    parts = ["<h2>Calibration</h2>", f"<p>{ROUTE_ALL}</p>" if is_route_all else "", _summary(layers)]
    mapped = {layer: row for layer, row in layers.items() if row["experts"]}
    if mapped:
        starved = "" if is_route_all else _starved(mapped)
        parts += [*_maps(mapped, settings.get("min_tokens", 0), is_route_all), starved, _largest(mapped)]
    parts.append(_dampened(exceptions["dampened"], settings.get("percdamp")))
    if rounded := exceptions["rounded"]:
        rows = ([f"<code>{escape(name)}</code>"] for name in rounded)
        parts += ["<h2>Only rounded: no Hessian to calibrate with</h2>", table(("tensor",), rows, len(rounded))]
    return "\n".join(parts)


def sent(row: Mapping[str, Any]) -> list[int]:
    """Tokens by expert that the router sent, also where experts learned from all."""
    found: list[int] = row.get("routed_tokens", row["tokens"])
    return found


def _routed(layers: Mapping[str, Mapping[str, Any]]) -> str:
    return " that the router sent" if any("routed_tokens" in row for row in layers.values()) else ""


def _summary(layers: Mapping[str, Mapping[str, Any]]) -> str:
    tokens = [count for row in layers.values() for count in sent(row)]
    gains = [row["error_to_rtn"] for row in layers.values() if row["error_to_rtn"] is not None]
    said = []
    if tokens:
        said.append(
            f"{len(tokens):,} experts in {len(layers):,} layers; tokens per expert{_routed(layers)} "
            f"{min(tokens):,} at least, {median(tokens):,.0f} in the middle, {max(tokens):,} at most."
        )
    if gains:
        said.append(
            "Squared error of the output over the calibration tokens, relative to rounding to nearest: "
            f"{median(gains):.3f} (median of the layers' medians)."
        )
    weights = [e for row in layers.values() if (e := row.get("weight_error_to_rtn")) is not None]
    if weights:
        said.append(f"Squared error of the weights themselves, likewise: {median(weights):.3f}.")
    floors = sum(row["rows_from_floor"] for row in layers.values())
    said.append(f"Output rows for which rtn or mse did better and were taken: {floors:,}.")
    return f"<p>{' '.join(said)}</p>"


def _maps(layers: Mapping[str, Mapping[str, Any]], min_tokens: int, is_route_all: bool) -> Iterable[str]:
    says = {layer: _say(layer, row) for layer, row in layers.items()}
    errors = {layer: dict(zip(row["experts"], row["errors"], strict=True)) for layer, row in layers.items()}
    tokens = {layer: dict(zip(row["experts"], sent(row), strict=True)) for layer, row in layers.items()}
    steps = error_steps([error for row in errors.values() for error in row.values()])
    yield (
        "<h2>Relative error by layer and expert</h2><p>Of the weights, over the projections of an expert. "
        "Calibration accepts a larger one for a smaller error of the output.</p>"
    )
    yield heat_map(errors, steps, says, "relative error of the weights by layer and expert")
    note = ROUTE_ALL if is_route_all else f"Under {min_tokens:,} an expert is starved."
    yield f"<h2>Calibration tokens{_routed(layers)} by layer and expert</h2><p>{note}</p>"
    yield heat_map(tokens, token_steps(min_tokens), says, "calibration tokens by layer and expert")


def _say(layer: str, row: Mapping[str, Any]) -> str:
    tokens, errors = sent(row), row["errors"]
    worst = row["experts"][errors.index(max(errors))]
    fewest = row["experts"][tokens.index(min(tokens))]
    return (
        f"layer {layer}: error {min(errors):.3%} to {max(errors):.3%} (expert {worst}), tokens {min(tokens):,} "
        f"(expert {fewest}) to {max(tokens):,}, {len(row['shrunk_experts'])} starved"
    )


def _experts(layers: Mapping[str, Mapping[str, Any]]) -> Iterable[tuple[str, int, int, float, float | None]]:
    for layer, row in layers.items():
        columns = row["experts"], sent(row), row["errors"], row["errors_to_rtn"]
        for expert, tokens, error, gain in zip(*columns, strict=True):
            yield layer, expert, tokens, error, gain


def _starved(layers: Mapping[str, Mapping[str, Any]]) -> str:
    shrunk = {layer: frozenset(row["shrunk_experts"]) for layer, row in layers.items()}
    found = sorted((e for e in _experts(layers) if e[1] in shrunk[e[0]]), key=lambda e: e[2])
    none = sum(e[2] == 0 for e in found)
    title = f"<h2>Starved experts: {len(found):,}, of these without any token: {none:,}</h2>"
    if not found:
        return title
    return title + "<p>The average input of their layer made up the rest.</p>" + _expert_table(found)


def _largest(layers: Mapping[str, Mapping[str, Any]]) -> str:
    found = sorted(_experts(layers), key=lambda e: -e[3])
    return "<h2>Experts with the largest error</h2>" + _expert_table(found[:ROWS], f"tokens{_routed(layers)}")


def _expert_table(found: Sequence[tuple[str, int, int, float, float | None]], tokens_are: str = "tokens") -> str:
    columns = ("layer", "expert", f">{tokens_are}", ">relative error", ">output error to rtn")
    rows = (
        [escape(layer), str(expert), f"{tokens:,}", f"{error:.4%}", "" if gain is None else f"{gain:.3f}"]
        for layer, expert, tokens, error, gain in found
    )
    return table(columns, rows, len(found))


def _dampened(found: Sequence[Mapping[str, Any]], asked: float | None) -> str:
    stated = "" if asked is None else f" ({asked:g})"
    title = f"<h2>Weights dampened more than the recipe states{stated}: {len(found):,}</h2>"
    if not found:
        return title
    rows = ([f"<code>{escape(e['tensor'])}</code>", f"{e['percdamp']:g}", str(e["attempts"])] for e in found)
    return title + table(("tensor", ">dampening", ">attempts"), rows, len(found))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], count: int, most: int = ROWS) -> str:
    """An HTML table of at most ``most`` rows, cells are HTML; ``>`` before a column's name: align to the right."""
    right = [name.startswith(">") for name in columns]
    kind = [" class=n" if r else "" for r in right]
    head = "".join(f"<th{k}>{escape(name.removeprefix('>'))}</th>" for k, name in zip(kind, columns, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{k}>{cell}</td>" for k, cell in zip(kind, row, strict=True)) + "</tr>"
        for _, row in zip(range(most), rows, strict=False)
    )
    more = f"<p>{count - most:,} more in report.json.</p>" if count > most else ""
    return f"<table><tr>{head}</tr>{body}</table>{more}"
