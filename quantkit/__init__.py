"""quantkit: from an FP8 Mixture-of-Experts checkpoint to a verified dual-precision artifact.

::

    import quantkit
    source = quantkit.open("tiny-glm")                      # Checkpoint, headers only
    plan = quantkit.plan(source, recipe="tiny-glm")         # frozen Plan
    artifact = quantkit.convert(plan, "tiny-glm-w4")        # Artifact
    quantkit.verify("tiny-glm-w4").ok

Names are resolved when first used, so that ``import quantkit`` costs nothing: no numpy, no torch, no pydantic.

``plan`` and ``convert`` are functions of the surface and also subpackages, and the import system binds a
subpackage to its parent under that very name. So those two subpackages are made callable when they are bound:
``quantkit.plan(...)`` always works, before and after ``import quantkit.plan.anything``, and type checkers see the
functions. Nothing else relies on it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import errors as errors
    from .api import Artifact as Artifact
    from .api import Checkpoint as Checkpoint
    from .api import Plan as Plan
    from .api import Recipe as Recipe
    from .api import convert as convert
    from .api import diff as diff
    from .api import inspect as inspect
    from .api import open as open
    from .api import plan as plan
    from .api import verify as verify

__all__ = [
    "Artifact", "Checkpoint", "Plan", "Recipe",
    "convert", "diff", "errors", "inspect", "open", "plan", "verify",
]  # fmt: skip


class _CallablePackage(ModuleType):
    """A subpackage that shares its name with a function of the surface, and calls it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(import_module("quantkit.api"), self.__name__.rpartition(".")[2])(*args, **kwargs)


class _Surface(ModuleType):
    """This package; sees when the import system binds a subpackage to it."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("plan", "convert") and isinstance(value, ModuleType):
            value.__class__ = _CallablePackage
        super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("quantkit")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("plan", "convert", "errors"):
        return import_module(f"{__name__}.{name}")
    value = getattr(import_module(f"{__name__}.api"), name)
    setattr(sys.modules[__name__], name, value)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


sys.modules[__name__].__class__ = _Surface
