"""Optional dependencies, imported when used, with one clear error when they are missing."""

from __future__ import annotations

import importlib
from types import ModuleType

from quantkit.errors import EnvironmentProblem


def require(module: str) -> ModuleType:
    """Import a module of the extra ``eval``.

    Raises:
        EnvironmentProblem: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise EnvironmentProblem(
            f"evaluation needs {module}, which is not installed", hint="Run: pip install 'quantkit[eval]'."
        ) from None
