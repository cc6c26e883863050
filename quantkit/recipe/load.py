"""Recipe files: find them by name or path, read them strictly (``document.py``)."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from ..errors import RecipeError
from .document import parse_mapping, read_bytes
from .errors import nearest
from .recipe import Recipe
from .validate import validate

PACKAGE = "quantkit_recipes"
SCHEMA_FILE = "recipe.schema.json"


def recipe_names() -> list[str]:
    """Names of the recipes that come with quantkit, sorted."""
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in resources.files(PACKAGE).iterdir()
        if entry.name.endswith(".yaml")
    )


def load_recipe(name_or_path: str | Path) -> Recipe:
    """A recipe by bundled name (``glm-5.2``) or path of a YAML or JSON file.

    A name wins over a file of the same name in the working directory; write ``./glm-5.2`` for the file.

    Raises:
        RecipeError: no such recipe, unreadable, or not following the schema (all problems in one message).
    """
    text_name = str(name_or_path)
    if isinstance(name_or_path, str) and text_name in recipe_names():
        data = (resources.files(PACKAGE) / f"{text_name}.yaml").read_bytes()
        return parse_recipe(data, where=f"recipe {text_name}")
    path = Path(name_or_path)
    if not path.exists():
        raise RecipeError(
            f"no recipe or file {text_name!r}", accepted=f"{', '.join(recipe_names())} or the path of a YAML file",
            hint=nearest(text_name, recipe_names()) if "/" not in text_name else None,
        )  # fmt: skip
    return parse_recipe(read_bytes(path), where=str(path))


def parse_recipe(data: bytes, *, where: str) -> Recipe:
    """A recipe from the bytes of a YAML (or JSON, which is YAML) document."""
    plain, lines = parse_mapping(data, where=where)
    return validate(plain, where=where, lines=lines)


def find_recipe(label: str) -> Recipe | None:
    """The bundled recipe written for a source (its repository, bundled name or the recipe's own name), or None."""
    for name in recipe_names():
        recipe = load_recipe(name)
        if label.lower() in (name, (recipe.source.repo or "").lower()):
            return recipe
    return None


def default_recipe() -> Recipe:
    """What happens without a recipe: routed experts to INT4, group 32, gptq; everything else as it is."""
    return Recipe(schema_version=1, name="default")


def json_schema() -> dict[str, Any]:
    """The JSON Schema that is published next to the recipes."""
    schema = Recipe.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "quantkit recipe"
    return schema


def render_json_schema() -> str:
    """The text of ``recipe.schema.json``; a test compares the file with it."""
    return json.dumps(json_schema(), indent=2, sort_keys=True, ensure_ascii=False) + "\n"
