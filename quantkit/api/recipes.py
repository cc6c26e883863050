"""Recipes: reading one, writing it out, and their schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..recipe import Recipe


def load_recipe(name_or_path: str) -> Recipe:
    """A bundled recipe or a YAML file; RecipeError with all problems at once."""
    from ..recipe import load_recipe as load

    return load(name_or_path)


def recipe_yaml(recipe: Recipe) -> str:
    """A recipe as YAML with every field written out; ``load_recipe`` reads it back to the same recipe."""
    import yaml

    text: str = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return text.rstrip("\n")


def recipe_schema() -> dict[str, Any]:
    """JSON Schema of recipes."""
    from ..recipe.load import json_schema

    return json_schema()
