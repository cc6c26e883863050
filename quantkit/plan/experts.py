"""Checks that the routed experts of a source are complete and alike.

A gap in the experts loads in most engines (the slot keeps its random start values) and costs a few tokens in a
thousand: nobody sees it. So it is an error here, with the names of what is missing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from ..checkpoint.tensor import StoredWeight
from ..errors import SourceError
from ..models.role import Role, TensorRole

_KINDS = ("gate", "up", "down")
_SHOWN = 5
_INCOMPLETE = "A file of the checkpoint is probably missing or was converted only in part."
_MIXED = "Files of different models seem to be mixed: download the checkpoint again."


def check_experts(
    weights: Mapping[str, StoredWeight], roles: Mapping[str, TensorRole], num_experts: int | None
) -> None:
    """Every layer with routed experts has all of them, with all three projections, of one shape each.

    Args:
        num_experts: what the config says; None: the largest number seen in the layer counts.

    Raises:
        SourceError: naming the missing experts or projections, or the expert of another shape.
    """
    layers: dict[int, dict[int, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for module, role in roles.items():
        if role.role is Role.ROUTED_EXPERT and role.layer is not None and role.expert is not None:
            layers[role.layer][role.expert][role.projection or "?"] = module
    for layer, experts in layers.items():
        _check_numbers(layer, experts, num_experts, weights)
        _check_projections(experts, weights)
        _check_shapes(experts, weights)


def check_layers(roles: Iterable[TensorRole], num_layers: int | None) -> str | None:
    """Every decoder layer that config.json announces is there.

    Returns:
        A warning when layers beyond them are no multi-token-prediction layers: config.json may count too few.

    Raises:
        SourceError: naming the missing layers.
    """
    present: set[int] = set()
    with_mtp: set[int] = set()
    for role in roles:
        if role.layer is not None:
            present.add(role.layer)
            if role.role is Role.MTP:
                with_mtp.add(role.layer)
    if num_layers is None or not present:
        return None
    inside = sorted(n for n in present if n < num_layers)
    if len(inside) < num_layers:
        missing = [n for n in range(min(num_layers, len(inside) + _SHOWN)) if n not in present][:_SHOWN]
        count = num_layers - len(inside)
        raise SourceError(
            f"{count:,} of the {num_layers:,} decoder layers that num_hidden_layers announces have no tensor: "
            f"{', '.join(map(str, missing))}{', ...' if count > len(missing) else ''}",
            where="config.json",
            hint="A file of the checkpoint is missing, or the config.json belongs to another model.",
        )
    if odd := sorted(n for n in present if n >= num_layers and n not in with_mtp):
        return (
            f"layer {odd[0]} lies beyond the {num_layers} of num_hidden_layers and is treated as a "
            "multi-token-prediction layer, but has none of the tensors of one: is config.json right?"
        )
    return None


def _check_numbers(
    layer: int,
    experts: Mapping[int, Mapping[str, str]],
    num_experts: int | None,
    weights: Mapping[str, StoredWeight],
) -> None:
    expected = num_experts if num_experts is not None else max(experts) + 1
    present = sum(e < expected for e in experts)
    if count := expected - present:  # counted and not listed: a damaged number may be astronomic
        missing = [e for e in range(min(expected, present + _SHOWN)) if e not in experts][:_SHOWN]
        more = f" and {count - _SHOWN:,} more" if count > _SHOWN else ""
        shown = ", ".join(map(str, missing))
        example = next(iter(next(iter(experts.values())).values()))
        raise SourceError(
            f"layer {layer} has {present} of {expected:,} routed experts; missing: {shown}{more}",
            where=weights[example].weight.place,
            hint=_INCOMPLETE,
        )  # fmt: skip
    if beyond := [e for e in experts if e >= expected]:
        raise SourceError(
            f"layer {layer} has routed expert {min(beyond)}, but config.json says there are {expected}",
            where=weights[next(iter(experts[min(beyond)].values()))].weight.place,
            hint=_MIXED,
        )


def _check_projections(experts: Mapping[int, Mapping[str, str]], weights: Mapping[str, StoredWeight]) -> None:
    for projections in experts.values():
        for kind in _KINDS:
            if kind not in projections:
                module = next(iter(projections.values()))
                raise SourceError(
                    f"routed expert without its {kind} projection (a two-dimensional weight is looked for)",
                    where=weights[module].weight.place, hint=_INCOMPLETE,
                )  # fmt: skip


def _check_shapes(experts: Mapping[int, Mapping[str, str]], weights: Mapping[str, StoredWeight]) -> None:
    for kind in _KINDS:
        shapes = Counter(weights[p[kind]].shape for p in experts.values())
        if len(shapes) == 1:
            continue
        usual = shapes.most_common(1)[0][0]
        odd = next(p[kind] for p in experts.values() if weights[p[kind]].shape != usual)
        raise SourceError(
            f"shape {list(weights[odd].shape)} differs from the other experts' {list(usual)}",
            where=weights[odd].weight.place,
            hint=_MIXED,
        )
