"""How one module is quantized: what planning decides for it and conversion carries out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Treatment:
    """Method (``recipe.sections.Method``) and group size of one module."""

    method: str
    group_size: int
