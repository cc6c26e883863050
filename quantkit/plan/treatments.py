"""How each module to be quantized is treated: the recipe's method and group size, or those of an override.

Overrides say how, never whether more: they are looked up for modules that ``selection`` chose, so none of them can
reach a router or a norm. ``keep`` takes modules out. The first entry whose pattern is found in a module's name
counts, and an entry that counts for no module is an error: it would be a wish that nobody hears.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import RecipeError
from ..models.role import Role
from ..recipe.recipe import Recipe
from ..recipe.sections import FOLDING_METHODS, Override
from ..recipe.treatment import Treatment
from .selection import Modules, check_calibrated, select


@dataclass(frozen=True)
class Treatments:
    """Module to be quantized -> how; all others stay as they are.

    Attributes:
        caught: for each override of the recipe, how many modules it decided.
    """

    by_module: Mapping[str, Treatment]
    caught: tuple[int, ...]


def treatments(modules: Modules, recipe: Recipe) -> Treatments:
    """Which modules are quantized, and how.

    Raises:
        RecipeError: as ``select``; an override that decides no module; nothing is left to quantize; a method that
            moves scales from up to down for one of the two alone; a calibrated method for modules that it can't
            have.
    """
    usual = Treatment(recipe.decode.method, recipe.decode.group_size)
    chosen = select(modules, recipe.decode)
    found, caught = _overridden(chosen, usual, recipe.overrides)
    for method in sorted({way.method for way in found.values()}):
        where = "decode.method" if method == usual.method else "overrides"
        check_calibrated(modules, frozenset(m for m, way in found.items() if way.method == method), method, where)
    _check_folds(modules, found)
    return Treatments(found, caught)


def _overridden(
    chosen: frozenset[str], usual: Treatment, overrides: tuple[Override, ...]
) -> tuple[dict[str, Treatment], tuple[int, ...]]:
    compiled = [re.compile(override.pattern) for override in overrides]
    ways = [None if o.keep else Treatment(o.method or usual.method, o.group_size or usual.group_size)
            for o in overrides]  # fmt: skip
    decided: Counter[int] = Counter()
    found: dict[str, Treatment] = {}
    for module in chosen:
        first = next((i for i, pattern in enumerate(compiled) if pattern.search(module)), None)
        if first is not None:
            decided[first] += 1
        way = usual if first is None else ways[first]
        if way is not None:
            found[module] = way
    for i, override in enumerate(overrides):
        if not decided[i]:
            raise _unheard(i, override, any(compiled[i].search(module) for module in chosen))
    if not found:
        raise RecipeError("nothing is left to quantize", where="overrides", hint="Keep less.")
    return found, tuple(decided[i] for i in range(len(overrides)))


def _unheard(number: int, override: Override, is_shadowed: bool) -> RecipeError:
    where = f"overrides.{number}"
    if is_shadowed:
        return RecipeError(
            f"every module that the pattern {override.pattern!r} matches is caught by an earlier override",
            where=where, hint="The first entry that matches counts: put the narrower pattern first.",
        )  # fmt: skip
    return RecipeError(
        f"the pattern {override.pattern!r} matches no module to be quantized", where=where,
        hint="Overrides change how modules are quantized; decode.linears, layers and quantize choose which.",
    )  # fmt: skip


def _check_folds(modules: Modules, found: Mapping[str, Treatment]) -> None:
    """What is taken out of up goes into down: both move, or the expert would compute something else."""
    experts: dict[str, dict[str, str]] = defaultdict(dict)
    for module, role in modules.roles.items():
        if role.role is Role.ROUTED_EXPERT and role.projection in ("up", "down"):
            way = found.get(module)
            experts[module.rpartition(".")[0]][role.projection] = "kept" if way is None else way.method
    for expert, methods in experts.items():
        if FOLDING_METHODS & set(methods.values()) and len(set(methods.values())) > 1:
            said = " and ".join(f"{projection} {method}" for projection, method in sorted(methods.items()))
            raise RecipeError(
                f"a method that moves scales from up to down is for both or neither; {expert} has {said}",
                where="overrides", hint="Let the pattern match both projections, or choose gptq.",
            )  # fmt: skip
