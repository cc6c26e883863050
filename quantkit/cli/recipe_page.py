"""docs/recipes.md: the fields of a recipe and the bundled recipes, read from the schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quantkit import api

from .docs import GENERATED

_EXAMPLE = "glm-5.2"
_INTRO = """\
A recipe says what a conversion makes. `quantkit convert NAME` uses a bundled one, `--recipe FILE` one of your own,
and command line options set single fields of it. Unknown keys are errors; all problems are reported at once. An
editor checks a file against `recipes/quantkit_recipes/recipe.schema.json` (also `quantkit recipes schema`).

The section `calibration` goes with a calibrated method (`gptq`) and is an error with any other."""


def recipe_page() -> str:
    """The page's text."""
    schema = api.recipe_schema()
    parts = ["# Recipes", GENERATED, _INTRO, "## Fields", _fields(schema), "## Bundled recipes", _bundled()]
    parts += [f"## `{_EXAMPLE}` with every field", f"```yaml\n{api.recipe_yaml(api.load_recipe(_EXAMPLE))}\n```"]
    return "\n\n".join(parts) + "\n"


def _fields(schema: Mapping[str, Any]) -> str:
    lines = ["| field | values | default | meaning |", "|---|---|---|---|"]
    for path, field in _walk(schema, schema, ""):
        default = "required" if "default" not in field else f"`{_plain(field['default'])}`"
        meaning = field.get("description", "").replace("|", "\\|")
        lines.append(f"| `{path}` | {_values(field)} | {default} | {meaning} |")
    return "\n".join(lines)


def _walk(
    schema: Mapping[str, Any], node: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, field in node["properties"].items():
        section = _section(schema, field)
        if section is not None:
            yield from _walk(schema, section, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def _section(schema: Mapping[str, Any], field: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The section that a field is, also one that may be absent (a union with null); None for a plain field."""
    for option in (field, *field.get("anyOf", ())):
        if "$ref" in option:
            found: Mapping[str, Any] = schema["$defs"][option["$ref"].rpartition("/")[2]]
            return found
    return None


def _values(field: Mapping[str, Any]) -> str:
    if "const" in field:
        return f"`{_plain(field['const'])}`"
    if "enum" in field:
        return ", ".join(f"`{_plain(v)}`" for v in field["enum"])
    if "anyOf" in field:
        return " or ".join(_values(option) for option in field["anyOf"])
    if field.get("type") == "array":
        item = field.get("items", {})
        return f"list of {_values(item)}" if item else "list"
    return str(field.get("type", "any"))


def _plain(value: Any) -> str:
    import json

    return value if isinstance(value, str) and value else json.dumps(value)


def _bundled() -> str:
    lines = ["| name | source | what it does |", "|---|---|---|"]
    for name in api.recipe_names():
        recipe = api.load_recipe(name)
        lines.append(f"| `{name}` | `{recipe.source.repo}` | {recipe.description} |")
    return "\n".join(lines)
