"""Where the gates and tasks lie that come with quantkit: ``evals/gates`` in a tree, inside the package in a wheel.

They are plain folders of the repository, since people read, copy and pass them by path; ``setup.py`` puts them
into ``quantkit_evals/data`` when it builds.
"""

from __future__ import annotations

from pathlib import Path

from quantkit.errors import EnvironmentProblem

_PACKAGE = Path(__file__).resolve().parent


def bundled(folder: str) -> Path:
    """The folder ``gates`` or ``tasks``; raises EnvironmentProblem if the installation lacks it."""
    for place in (_PACKAGE / "data" / folder, _PACKAGE.parent / folder):
        if place.is_dir():
            return place
    raise EnvironmentProblem(f"quantkit is installed without its {folder}", hint="Install it again.")
