"""Conversion: executes a plan into an artifact, in bounded memory, resumable, with the same bytes every time."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .progress import Progress as Progress
    from .run import assist as assist
    from .run import convert as convert

_WHERE = {"assist": "run", "convert": "run", "Progress": "progress"}
__all__ = ["Progress", "assist", "convert"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_WHERE[name]}", __name__), name)
