"""Recipe files: find them by name or path, read them strictly.

YAML's freedoms that hide mistakes are closed here: duplicate keys are errors (the last one would win silently),
and only plain mappings of the safe loader are accepted.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from ..errors import RecipeError
from .errors import Path as KeyPath
from .errors import nearest
from .recipe import Recipe
from .validate import validate

PACKAGE = "quantkit_recipes"
SCHEMA_FILE = "recipe.schema.json"
_MAX_BYTES = 1 << 20  # a recipe is a page of text; anything bigger is the wrong file


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
    try:
        with open(path, "rb") as handle:  # the size is not asked for: a pipe or device states none
            data = handle.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise RecipeError(f"more than {_MAX_BYTES:,} bytes are too many for a recipe", where=str(path))
    except OSError as error:
        raise RecipeError(f"cannot be read: {error.strerror}", where=str(path)) from None
    return parse_recipe(data, where=str(path))


def parse_recipe(data: bytes, *, where: str) -> Recipe:
    """A recipe from the bytes of a YAML (or JSON, which is YAML) document."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise RecipeError(f"not UTF-8 text: byte 0x{data[error.start]:02x}", where=f"{where}:{line}") from None
    lines: dict[KeyPath, int] = {}
    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if isinstance(node, yaml.MappingNode):
                _check_keys(node, (), lines, where, set())
            plain = loader.construct_document(node) if node is not None else None
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f"{where}:{mark.line + 1}" if mark else where
        raise RecipeError(f"not valid YAML: {getattr(error, 'problem', None) or error}", where=at) from None
    except (ValueError, RecursionError) as error:  # an impossible date, nesting without end
        raise RecipeError(f"not valid YAML: {error}", where=where) from None
    if not isinstance(plain, dict):
        seen = "an empty file" if plain is None else f"a {type(plain).__name__}"
        raise RecipeError(f"{seen} where a mapping is expected", where=f"{where}:1", accepted="keys and values")
    return validate(plain, where=where, lines=lines)


def _check_keys(
    node: yaml.MappingNode, path: KeyPath, lines: dict[KeyPath, int], where: str, seen: set[int]
) -> None:
    """Record the line of every key; refuse duplicates, keys that are not text, and aliases of mappings.

    Aliases can nest a page into more keys than memory holds, and no recipe needs them.
    """
    if id(node) in seen:
        raise RecipeError("an alias repeats this mapping", where=f"{where}:{node.start_mark.line + 1}")
    seen.add(id(node))
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
            raise RecipeError(f"the key {getattr(key, 'value', '?')!r} is not text", where=f"{where}:{line}")
        here = (*path, key.value)
        if here in lines:
            raise RecipeError(
                f"duplicate key {'.'.join(map(str, here))!r}, first on line {lines[here]}", where=f"{where}:{line}"
            )
        lines[here] = line
        if isinstance(value, yaml.MappingNode):
            _check_keys(value, here, lines, where, seen)


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
