"""From plain data to a :class:`Recipe`, or to one error that lists everything wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from .errors import Path, from_validation
from .recipe import Recipe


def validate(data: Mapping[str, Any], *, where: str, lines: Mapping[Path, int] | None = None) -> Recipe:
    """Check ``data`` against the schema.

    Args:
        where: file or option group, for the message.
        lines: line of each key path in the file, if there is one.

    Raises:
        RecipeError: with all problems at once.
    """
    try:
        return Recipe.model_validate(dict(data))
    except ValidationError as error:
        raise from_validation(error, Recipe, where, lines) from None
