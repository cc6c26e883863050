"""``quantkit recipes``: what there is, what one says, and the schema they follow."""

from __future__ import annotations

import click

from quantkit import api

from ..console import Console, document
from ..lazy import Example, command
from ..options import RecipeName, output_options


@command(
    "recipes",
    Example("what there is", "quantkit recipes"),
    Example("start a recipe of your own", "quantkit recipes show glm-5.2 > my-recipe.yaml"),
    Example("schema for an editor", "quantkit recipes schema > recipe.schema.json"),
    short_help="List and show the bundled recipes, print their schema.",
)
@click.argument("action", type=click.Choice(["list", "show", "schema"]), default="list")
@click.argument("name", type=RecipeName(), required=False)
@output_options
def recipes(action: str, name: str | None, out: Console) -> None:
    """List the bundled recipes, show one (or a file) with every default filled in, or print the JSON Schema."""
    from .. import show

    if (action == "show") != (name is not None):
        raise click.UsageError("`recipes show` needs NAME, and only `show` takes one.")
    if action == "schema":
        out.raw(document(api.recipe_schema()))
    elif name is not None:
        recipe = api.load_recipe(name)
        out.result(lambda: recipe.model_dump(mode="json"), lambda: [api.recipe_yaml(recipe)])
    else:
        found = [api.load_recipe(n) for n in api.recipe_names()]
        out.result(lambda: [r.model_dump(mode="json") for r in found], lambda: show.recipe_list(found))
