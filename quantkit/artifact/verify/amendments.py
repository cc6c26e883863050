"""Verification of the quality budget: amendments and records agree, what was quantized is within its limits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from pydantic import ValidationError

from ...models.families import GENERIC
from ...models.role import Role
from ...plan.fate import KEPT_BY_BUDGET, Action
from ...recipe.sections import BudgetSection
from ..amendment import Amendment
from ..layout import MANIFEST
from ..manifest import Manifest
from ..records import TensorRecord
from .findings import Findings, Section
from .records import Accounts


def check_amendments(manifest: Manifest, findings: Findings, accounts: Accounts) -> None:
    """Layers that are amended hold nothing quantized and say why, no other layer says so, and limits are kept."""
    stated, amendments = manifest.recipe.get("budget"), manifest.plan_amendments
    if stated is None and not amendments and not any(map(_is_kept, accounts.records.values())):
        return
    with findings.section("budget") as section:
        budget = _budget(stated, section)
        if amendments and (budget is None or not budget.keeps):
            section.problem("amendments of the plan, but the recipe's budget keeps no layer", MANIFEST)
        by_layer: dict[int | None, list[TensorRecord]] = defaultdict(list)
        for record in accounts.records.values():
            by_layer[record.layer].append(record)
        if len({a.layer for a in amendments}) < len(amendments):
            section.problem("one layer is amended twice", MANIFEST)
        for amendment in amendments:
            _check_amended(amendment, by_layer[amendment.layer], budget, section)
        amended = {a.layer for a in amendments}
        limited = [r for layer, records in by_layer.items() if layer not in amended for r in records]
        section.summary = (
            f"{_check_limits(limited, budget, section):,} quantized weights are within their limits, "
            f"{len(amendments)} layers are kept"
        )


def _budget(stated: object, section: Section) -> BudgetSection | None:
    if stated is None:
        return None
    try:
        return BudgetSection.model_validate(stated)
    except ValidationError:
        section.problem("the budget of the recipe cannot be read", MANIFEST)
        return None


def _check_amended(
    amendment: Amendment, records: Iterable[TensorRecord], budget: BudgetSection | None, section: Section
) -> None:
    where = f"{MANIFEST}: amendment of layer {amendment.layer}"
    kept = {}
    for record in records:
        if record.decode.action == Action.QUANTIZE.value:
            section.problem("is quantized, but its layer is amended", record.name)
        if _is_kept(record) and _limit(record, budget) is not None:
            kept[record.name] = record
    if len(kept) != amendment.weights or not 0 < amendment.over_limit <= amendment.weights:
        section.problem(
            f"counts {amendment.over_limit:,} of {amendment.weights:,} weights, the records {len(kept):,}", where
        )
    worst = amendment.worst
    if worst.tensor not in kept:
        section.problem(f"names {worst.tensor!r}, which is no kept weight of the layer with a limit", where)
    elif worst.limit != _limit(kept[worst.tensor], budget) or not worst.relative_error > worst.limit:
        section.problem(f"{worst.relative_error:g} over {worst.limit:g} does not follow from the budget", where)


def _check_limits(records: Iterable[TensorRecord], budget: BudgetSection | None, section: Section) -> int:
    """Returns how many weights have a limit."""
    count = 0
    for record in records:
        if _is_kept(record):
            section.problem("is kept by the quality budget, but its layer is not amended", record.name)
        limit, error = _limit(record, budget), record.decode.relative_error
        if record.decode.action != Action.QUANTIZE.value or limit is None or error is None:
            continue
        count += 1
        if error > limit:
            section.problem(f"relative error {error:g} is over its limit {limit:g}", record.name)
    return count


def _is_kept(record: TensorRecord) -> bool:
    return record.reason == KEPT_BY_BUDGET


def _limit(record: TensorRecord, budget: BudgetSection | None) -> float | None:
    """The limit of a routed expert's weight; None for all other tensors."""
    module, _, part = record.name.rpartition(".")
    if budget is None or part != "weight" or record.role != Role.ROUTED_EXPERT.value:
        return None
    return budget.limit(GENERIC.projections.get(module.rpartition(".")[2]))
