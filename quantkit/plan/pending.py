"""What a recipe may say and planning does not honour yet: refused, never ignored."""

from __future__ import annotations

from ..errors import RecipeError
from ..recipe.recipe import Recipe
from ..recipe.sections import FOLDING_METHODS


def refuse_pending(recipe: Recipe) -> None:
    """
    Raises:
        RecipeError: naming the option.
    """
    asked = {
        "overrides": any(o.method in FOLDING_METHODS for o in recipe.overrides),
        "decode.method": recipe.decode.method in FOLDING_METHODS,
    }
    if option := next((name for name, is_asked in asked.items() if is_asked), None):
        raise RecipeError("is not supported yet", where=option, hint="Leave it out.")
