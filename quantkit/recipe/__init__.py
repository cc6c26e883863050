"""Recipes: what the user asks of a conversion.

Names are resolved on first use, so that importing the package costs neither pydantic nor YAML.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .load import default_recipe as default_recipe
    from .load import find_recipe as find_recipe
    from .load import load_recipe as load_recipe
    from .load import recipe_names as recipe_names
    from .recipe import Recipe as Recipe

_HOME = {"Recipe": "recipe"}  # everything else lives in load

__all__ = ["Recipe", "default_recipe", "find_recipe", "load_recipe", "recipe_names"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOME.get(name, 'load')}", __name__), name)
