"""What a source is and whether a recipe fits it: family, how its routed experts are stored, its FP8 side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..checkpoint.tensor import Storage
from ..errors import RecipeError, UnsupportedError
from ..models.families import FAMILIES
from ..models.role import Role
from ..recipe.sections import DATA_FREE_METHOD
from .views import FP8

if TYPE_CHECKING:
    from ..models.classify import Classifier
    from ..recipe import Recipe
    from .selection import Modules


def source_storage(modules: Modules) -> str:
    """``fp8``, ``int4`` or ``plain``, by the routed experts."""
    seen: dict[Storage, str] = {}
    for module, role in modules.roles.items():
        if role.role is Role.ROUTED_EXPERT:
            seen.setdefault(modules.weights[module].storage, module)
    if Storage.INT4_GROUP in seen:
        if len(seen) > 1:
            odd = next(m for s, m in seen.items() if s is not Storage.INT4_GROUP)
            raise UnsupportedError("some routed experts are INT4 and others are not",
                where=modules.weights[odd].weight.place, accepted="one way of storing for all routed experts",
            )  # fmt: skip
        return "int4"
    return "fp8" if FP8 & set(seen) else "plain"


def no_fp8_side(storage: str, modules: Modules) -> UnsupportedError:
    example = next(m for m, role in modules.roles.items() if role.role is Role.ROUTED_EXPERT)
    kind = "native INT4" if storage == "int4" else "BF16"
    return UnsupportedError(
        f"the source has no FP8 weights to be the prefill view: its routed experts are {kind}",
        where=modules.weights[example].weight.place,
        accepted="an FP8 checkpoint", hint="Use --make-fp8 (prefill.make_fp8: true) to derive FP8 from it.",
    )  # fmt: skip


def check_family(recipe: Recipe, config: Mapping[str, Any]) -> None:
    """A recipe for another family is a mix-up of source and recipe, not a wish."""
    model_type = config.get("model_type")
    actual = next((f.name for f in FAMILIES if model_type in f.model_types), None)
    if recipe.family and actual and recipe.family != actual:
        raise RecipeError(
            f"recipe {recipe.name!r} is for family {recipe.family}, but the source is {actual} "
            f"(model_type {model_type})", where="family",
            hint="Choose the recipe of this model, or leave family out.",
        )  # fmt: skip


def resolved_recipe(recipe: Recipe, classifier: Classifier, storage: str) -> Recipe:
    """The recipe with the family that was found, so that asking for it by name or not makes the same pair.

    A native INT4 source has nothing to quantize: no method is at work there, so none that calibrates is recorded.
    """
    name = classifier.family.name
    is_tabled = any(family.name == name for family in FAMILIES)
    found = recipe.model_copy(update={"family": name}) if is_tabled else recipe
    return found.with_options(method=DATA_FREE_METHOD) if storage == "int4" and found.calibration else found
