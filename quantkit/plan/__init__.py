"""Planning: the fate of every tensor and the exact sizes, before any work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .build import build_plan as build_plan
    from .plan import Plan as Plan
    from .plan import SourceId as SourceId
    from .plan_file import load_plan as load_plan
    from .plan_file import write_plan as write_plan

_HOME = {
    "Plan": "plan", "SourceId": "plan", "build_plan": "build", "load_plan": "plan_file", "write_plan": "plan_file",
}  # fmt: skip

__all__ = ["Plan", "SourceId", "build_plan", "load_plan", "write_plan"]


def __getattr__(name: str) -> Any:
    # Resolved on first use: planning needs pydantic and numpy, which `quantkit --help` must not load.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOME[name]}", __name__), name)
