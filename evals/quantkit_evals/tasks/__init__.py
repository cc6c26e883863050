"""Tasks: what a candidate is asked, as YAML files with JSON lines, or by the name that lm-eval knows them by.

    schema     a task file, closed; conventions that make three lines enough
    items      its JSON lines, checked one by one
    find       names, paths and suites -> sources of tasks
    source     a task of ours: version, metrics, the object that lm-eval runs
    named      a task of lm-eval by name, with the same attributes
    answers    metrics of answers that were generated

Names are resolved on first use, so that importing the package costs neither pydantic nor lm-eval.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .find import find_tasks as find_tasks
    from .find import suite_names as suite_names
    from .find import task_names as task_names
    from .source import TaskSource as TaskSource

_HOME = {"TaskSource": "source"}  # everything else lives in find

__all__ = ["TaskSource", "find_tasks", "suite_names", "task_names"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOME.get(name, 'find')}", __name__), name)
