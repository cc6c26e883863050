"""What a source may be called, and which recipe goes with it.

Tried in this order: a path that exists (a recipe file stands for the repository it names), a bundled model, a
recipe (which stands for the repository it was written for), a Hub repository ``org/name``. So nothing on disk is
ever hidden by a name, and a typing mistake is answered with the nearest names instead of a question to the
network.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .errors import RecipeError, UsageError

if TYPE_CHECKING:
    from .plan import Plan
    from .recipe import Recipe

RECIPE_SUFFIXES = (".yaml", ".yml")


class Resolved(NamedTuple):
    """What a SOURCE stands for: what to open, at which revision, and the recipe that goes with it, if any."""

    source: str
    revision: str | None
    recipe: Recipe | None

    @property
    def is_hub(self) -> bool:
        """It is a Hub repository: reading its headers takes a moment and the network."""
        from .checkpoint.source import expand_home, is_hub_id

        return is_hub_id(self.source) and not os.path.lexists(expand_home(self.source))


def resolve(source: str | os.PathLike[str], *, revision: str | None = None) -> Resolved:
    """What a source's name stands for; see the module.

    Raises:
        RecipeError: a recipe file that is not valid, or has no repository to convert.
        UsageError: nothing of this name, with the nearest names.
    """
    from .checkpoint import BUNDLED
    from .checkpoint.source import expand_home
    from .recipe import find_recipe, load_recipe, recipe_names

    text = os.fspath(source)
    if os.path.lexists(expand_home(text)):
        if not text.endswith(RECIPE_SUFFIXES):
            return Resolved(text, revision, None)
        recipe = load_recipe(Path(text))
    elif text in BUNDLED:
        return Resolved(text, revision, find_recipe(text))
    elif text in recipe_names():
        recipe = load_recipe(text)
    elif "/" in text:
        return Resolved(text, revision, None)
    else:
        raise _unknown(text)
    if recipe.source.repo is None:
        raise RecipeError(
            "the recipe names no source.repo", where=text, hint="Give the source, and the recipe with --recipe."
        )
    return Resolved(recipe.source.repo, revision or recipe.source.revision, recipe)


def default_output(source: str | os.PathLike[str] | None, plan: Plan) -> Path:
    """Where an artifact goes when nothing is said: ``./NAME-w4-gGROUP``, NAME the last part of the source."""
    from .checkpoint.source import expand_home

    name = expand_home(os.fspath(source or plan.source.label)).resolve().name
    for suffix in (".safetensors", *RECIPE_SUFFIXES):
        name = name.removesuffix(suffix)
    return Path(f"{name}-w4-g{plan.recipe.decode.group_size}")


def source_names() -> list[str]:
    """Names that need no path: bundled models and recipes."""
    from .checkpoint import BUNDLED

    return sorted({*BUNDLED, *recipe_names()})


def recipe_names() -> list[str]:
    """Names of the bundled recipes."""
    from .recipe import recipe_names as names

    return list(names())


def _unknown(text: str) -> UsageError:
    from difflib import get_close_matches

    near = get_close_matches(text, source_names(), n=2, cutoff=0.5)
    return UsageError(
        f"no such file, directory, model or recipe: {text!r}",
        accepted="a directory, a .safetensors file, a bundled model, a recipe's name or a Hub id (org/name)",
        hint=f"Did you mean {' or '.join(near)}?" if near else "`quantkit recipes` lists the names.",
    )
