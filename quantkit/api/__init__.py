"""The library's surface: everything the command line does, as functions.

Ten names are the promise (``quantkit.__all__``): open, plan, convert, verify, inspect, diff, Artifact, Checkpoint,
Plan, Recipe; ``errors`` is the module of what they raise. The command line uses this module and nothing below it,
except to show results. Functions import what they need when called, because the command line imports this module
to complete a name in the shell.

What a source may be called: see ``quantkit.naming``.
"""

from __future__ import annotations

import builtins
from typing import TYPE_CHECKING, Any

from ..naming import Resolved as Resolved
from ..naming import default_output as default_output
from ..naming import recipe_names as recipe_names
from ..naming import resolve as resolve
from ..naming import source_names as source_names
from .converting import assist as assist
from .converting import convert as convert
from .converting import describe_result as describe_result
from .converting import together as together
from .kernels import check_kernels as check_kernels
from .looking import compare as compare
from .looking import diff as diff
from .looking import inspect as inspect
from .looking import report as report
from .looking import tensor_statistics as tensor_statistics
from .looking import verify as verify
from .planning import load_plan as load_plan
from .planning import plan as plan
from .planning import plan_document as plan_document
from .planning import plan_source as plan_source
from .planning import save_plan as save_plan
from .planning import unloadable as unloadable
from .recipes import load_recipe as load_recipe
from .recipes import recipe_schema as recipe_schema
from .recipes import recipe_yaml as recipe_yaml
from .sources import PathLike as PathLike
from .sources import open as open
from .sources import open_view as open_view

if TYPE_CHECKING:
    from ..artifact import Artifact as Artifact
    from ..checkpoint import Checkpoint as Checkpoint
    from ..plan import Plan as Plan
    from ..recipe import Recipe as Recipe

_HOME = {"Artifact": "artifact", "Checkpoint": "checkpoint", "Plan": "plan", "Recipe": "recipe"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return builtins.getattr(import_module(f"quantkit.{_HOME[name]}"), name)
