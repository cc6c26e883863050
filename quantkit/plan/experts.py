"""Checks that the routed experts of a source are complete and alike.

A gap in the experts loads in most engines (the slot keeps its random start values) and costs a few tokens in a
thousand: nobody sees it. So it is an error here, with the names of what is missing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from ..checkpoint.tensor import StoredWeight
from ..errors import SourceError
from ..models.role import Role, TensorRole

_KINDS = ("gate", "up", "down")
_SHOWN = 5


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
        _check_numbers(layer, experts, num_experts)
        _check_projections(experts)
        _check_shapes(experts, weights)


def _check_numbers(layer: int, experts: Mapping[int, Mapping[str, str]], num_experts: int | None) -> None:
    expected = num_experts if num_experts is not None else max(experts) + 1
    missing = [e for e in range(expected) if e not in experts]
    example = next(iter(next(iter(experts.values())).values()))
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        shown = ", ".join(map(str, missing[:_SHOWN]))
        raise SourceError(
            f"layer {layer} has {len(experts)} of {expected} routed experts; missing: {shown}{more}",
            where=example,
            hint="A file of the checkpoint is probably missing or was converted only in part.",
        )  # fmt: skip
    if beyond := [e for e in experts if e >= expected]:
        raise SourceError(
            f"layer {layer} has routed expert {min(beyond)}, but config.json says there are {expected}",
            where=next(iter(experts[min(beyond)].values())),
        )


def _check_projections(experts: Mapping[int, Mapping[str, str]]) -> None:
    for projections in experts.values():
        for kind in _KINDS:
            if kind not in projections:
                module = next(iter(projections.values()))
                raise SourceError(f"routed expert without its {kind} projection", where=module.rpartition(".")[0])


def _check_shapes(experts: Mapping[int, Mapping[str, str]], weights: Mapping[str, StoredWeight]) -> None:
    for kind in _KINDS:
        shapes = Counter(weights[p[kind]].shape for p in experts.values())
        if len(shapes) == 1:
            continue
        usual = shapes.most_common(1)[0][0]
        odd = next(p[kind] for p in experts.values() if weights[p[kind]].shape != usual)
        raise SourceError(
            f"shape {list(weights[odd].shape)} differs from the other experts' {list(usual)}",
            where=weights[odd].weight.name,
        )
