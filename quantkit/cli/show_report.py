"""How ``quantkit report`` lays out one conversion, and two."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

from .console import Block, Table

if TYPE_CHECKING:
    from quantkit.inspection.conversions import Comparison, Group, Side

_CALIBRATED = (
    ">experts",
    ">tokens, least",
    ">median",
    ">starved",
    ">output error to rtn",
    ">weight error to rtn",
    ">dampening",
)
_ROUTED = {">tokens, least": ">routed, least"}  # where experts learned from all tokens
_NAMES = 3  # of the retried weights of a layer


def conversion(path: str, found: Mapping[str, Any]) -> Iterator[Block]:
    """One conversion from its report: totals, then a line per layer."""
    decode = found["recipe"]["decode"]
    yield f"artifact   {path}"
    yield f"source     {found['source'] or '(a local checkpoint)'}, {found['family']}"
    yield f"pair       {found['pair_id']}"
    yield f"method     {decode['method']}, group size {decode['group_size']}, by {found['engine']}"
    for override in found["recipe"].get("overrides", ()):
        yield f"override   {override['pattern']}: {override_text(override)}"
    for kept in found.get("amendments", ()):
        worst = kept["worst"]
        yield (
            f"kept       layer {kept['layer']} by the quality budget: {kept['over_limit']:,} of "
            f"{kept['weights']:,} weights over the limit, at most {worst['relative_error']:.3%} "
            f"where {worst['limit']:.3%} is allowed"
        )
    yield from _retried(found.get("exceptions", {}).get("retried"))
    errors, layers = found["errors"].get("decode"), found.get("calibration", {})
    if errors is None:
        yield "No weight of the decode view was rounded."
        return
    yield f"rounded    {_spread(errors['all'])}"
    for name, row in errors["by_projection"].items():
        yield f"           {_spread(row)}: {name}"
    if layers:
        yield from _calibration(layers, found["exceptions"], found.get("route_all", False))
    calibrated = [_ROUTED.get(name, name) if _is_routed(layers) else name for name in _CALIBRATED]
    columns = ["layer", ">weights", ">error, mean", ">largest", *(calibrated if layers else ())]
    rows = [
        [layer, f"{row['weights']:,}", f"{row['rms']:.3%}", f"{row['max']:.3%}",
         *(_covered(layers.get(layer)) if layers else ())]
        for layer, row in errors["by_layer"].items()
    ]  # fmt: skip
    yield Table("Decode view by layer", columns, rows)


def _spread(row: Mapping[str, Any]) -> str:
    return f"{row['weights']:,} weights, relative error {row['rms']:.3%} in the mean, {row['max']:.3%} at most"


def _retried(layers: Mapping[str, Mapping[str, list[str]]] | None) -> Iterator[Block]:
    """Weights that a quality budget had tried again, by layer; None: it does not ask for it."""
    from quantkit.artifact.attachments.retries import count_by_way

    if layers is None:
        return
    total = sum(len(names) for ways in layers.values() for names in ways.values())
    ways = f": {count_by_way(layers)}; --json names all" if total else ""
    yield f"retried    {total:,} weights under the quality budget{ways}"
    for layer, found in layers.items():
        names = [name.partition(f".layers.{layer}.")[2] or name for way in found.values() for name in way]
        more = f" and {len(names) - _NAMES:,} more" if len(names) > _NAMES else ""
        yield f"           layer {layer}: {len(names):,}: {', '.join(names[:_NAMES])}{more}"


def _is_routed(layers: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether experts learned from more tokens than the router sent, which are known apart."""
    return any("routed_tokens" in row for row in layers.values())


def _sent(row: Mapping[str, Any]) -> list[int]:
    found: list[int] = row.get("routed_tokens", row["tokens"])
    return found


def _calibration(
    layers: Mapping[str, Mapping[str, Any]], exceptions: Mapping[str, Any], is_route_all: bool
) -> Iterator[Block]:
    tokens = [count for row in layers.values() for count in _sent(row)]
    if tokens and is_route_all:
        routed = (
            f"; the router sent {min(tokens):,} at least, {median(tokens):,.0f} in the middle; "
            f"{tokens.count(0):,} without any" if _is_routed(layers) else ""
        )  # fmt: skip
        yield f"experts    {len(tokens):,}; route-all: each learned from all tokens, none is starved{routed}"
    elif tokens:
        starved = sum(len(row["shrunk_experts"]) for row in layers.values())
        yield (
            f"experts    {len(tokens):,}; tokens {min(tokens):,} at least, {median(tokens):,.0f} in the middle; "
            f"{starved:,} starved, {tokens.count(0):,} without any token"
        )
    yield (
        f"exceptions {len(exceptions['dampened']):,} dampened more than asked, {len(exceptions['rounded']):,} "
        f"only rounded, {sum(row['rows_from_floor'] for row in layers.values()):,} rows from rtn or mse"
    )


def _covered(row: Mapping[str, Any] | None) -> list[str]:
    if row is None:
        return [""] * len(_CALIBRATED)
    tokens = _sent(row)
    return [
        f"{len(tokens):,}", f"{min(tokens):,}" if tokens else "", f"{median(tokens):,.0f}" if tokens else "",
        f"{len(row['shrunk_experts']):,}", _number(row["error_to_rtn"]),
        _number(row.get("weight_error_to_rtn")), f"{row['largest_percdamp']:g}",
    ]  # fmt: skip


def comparison(found: Comparison) -> Iterator[Block]:
    """Two conversions: totals by projection, then by layer and projection."""
    yield f"source     {found.source}"
    yield f"A          {_side(found.a)}"
    yield f"B          {_side(found.b)}"
    total = found.total
    if not total.weights:
        yield "No weight was rounded in both."
    columns = [_WEIGHTS]
    if found.a.calibration or found.b.calibration:
        columns.append(_OUTPUTS)
    if total.only_a or total.only_b:
        columns.append(_ONLY)
    names = [name for table in columns for name in table]

    def cells(group: Group) -> list[str]:
        return [show(getattr(group, key)) for table in columns for key, show in table.values()]

    rows = [[group.projection or "all", *cells(group)] for group in (*found.projections, total)]
    yield Table("Decode view by projection", ("projection", *names), rows)
    rows = [["none" if g.layer is None else str(g.layer), g.projection or "", *cells(g)] for g in found.groups]
    yield Table("Decode view by layer and projection", ("layer", "projection", *names), rows)
    yield ""
    yield "error: of the weights. A ratio below 1, and better: B's are nearer to the source's."
    if _OUTPUTS in columns:
        yield "output: squared error of the output over the calibration tokens relative to rtn's, median."


def _side(side: Side) -> str:
    data = f", calibration {side.calibration[:16]}" if side.calibration else ""
    more = f", {side.overrides} overrides" if side.overrides else ""
    return f"{side.path}: {side.method}, group size {side.group_size}{more}, by {side.engine}{data}"


def override_text(override: Mapping[str, Any]) -> str:
    """What an override of a recipe says, without its pattern."""
    if override["keep"]:
        return "kept"
    size = override["group_size"] and f"group size {override['group_size']}"
    return ", ".join(filter(None, (override["method"], size)))


def _number(figure: float | None) -> str:
    return "" if figure is None else f"{figure:.3f}"


def _percent(figure: float | None) -> str:
    return "" if figure is None else f"{figure:.3%}"


def _count(number: int) -> str:
    return f"{number:,}"


_Columns = dict[str, tuple[str, Callable[[Any], str]]]  # title -> field of a Group, how it is shown
_WEIGHTS: _Columns = {
    ">weights": ("weights", _count), ">error A": ("error_a", _percent), ">error B": ("error_b", _percent),
    ">B / A": ("ratio", _number), ">better": ("better", _count), ">worse": ("worse", _count),
}  # fmt: skip
_OUTPUTS: _Columns = {
    ">output A": ("output_a", _number), ">output B": ("output_b", _number),
    ">output better": ("output_better", _count), ">output worse": ("output_worse", _count),
}  # fmt: skip
_ONLY: _Columns = {">only in A": ("only_a", _count), ">only in B": ("only_b", _count)}
