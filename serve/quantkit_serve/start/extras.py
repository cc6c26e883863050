"""Packages of the extra ``serve``, looked for before anything slow begins."""

from __future__ import annotations

from importlib.util import find_spec

from quantkit.errors import EnvironmentProblem

NEEDED = ("fastapi", "uvicorn", "prometheus_client", "tokenizers", "jinja2", "llguidance")


def check_extras() -> None:
    """
    Raises:
        EnvironmentProblem: names every package that is missing.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise EnvironmentProblem(
            f"serving needs {', '.join(missing)}, not installed", hint="Run: pip install 'quantkit[serve]'."
        )
