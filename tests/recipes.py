"""Recipes for tests whose subject is not calibration, which the default method needs a tokenizer and time for."""

from __future__ import annotations

from typing import Any

from quantkit.recipe import Recipe, default_recipe, load_recipe


def data_free_recipe(name: str | None = None, **options: Any) -> Recipe:
    """A bundled recipe (None: the default one) with a method that looks at the weights alone."""
    base = default_recipe() if name is None else load_recipe(name)
    return base.with_options(**{"method": "mse", **options})
