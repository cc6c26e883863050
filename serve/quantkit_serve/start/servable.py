"""What ``quantkit serve SOURCE`` stands for: a directory, or a bundled model, converted the first time.

A bundled model becomes an artifact in the user's cache (``$XDG_CACHE_HOME/quantkit/artifacts``, by default
``~/.cache``), by its own recipe; ``tiny-glm-w4``, as the artifact is called in all examples, is the same unless a
directory of that name is there. The folder's name carries the version of the code that made it, so that an older
one is never served by mistake. A recipe's name or a Hub repository is not converted here: that takes hours, and a
disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import quantkit
from quantkit.errors import ArtifactError, UsageError

if TYPE_CHECKING:
    from quantkit.artifact.progress import OnProgress


class Servable(NamedTuple):
    """A directory, and what its model is called."""

    folder: Path
    name: str


def servable(
    source: str, *, say: Callable[[str], None] = lambda _: None, on_progress: OnProgress | None = None
) -> Servable:
    """What to serve.

    Args:
        say: told when something is converted first.

    Raises:
        UsageError: neither a directory nor a bundled model.
        ArtifactError: a directory without a model, or a conversion that has not ended.
        EnvironmentProblem: the cache can't be written, or what conversion needs is not installed.
    """
    from quantkit.checkpoint import BUNDLED

    path = Path(source).expanduser()
    if path.is_dir():
        _check_is_model(path)
        return Servable(path, path.resolve().name)
    name = source.removesuffix("-w4")
    if path.exists() or name not in BUNDLED:
        raise UsageError(
            "is not a directory", where=source,
            accepted=f"an artifact, a checkpoint's directory, or a bundled model ({', '.join(sorted(BUNDLED))})",
            hint="`quantkit convert` makes an artifact of anything else.",
        )  # fmt: skip
    target = cache_folder() / f"{name}-{quantkit.__version__}"
    if not target.exists():
        say(f"{name} is converted first, into {target}; once, in under a minute")
        target.parent.mkdir(parents=True, exist_ok=True)
        quantkit.convert(quantkit.plan(name), target, on_progress=on_progress)
    return Servable(target, name)


def _check_is_model(folder: Path) -> None:
    from quantkit.artifact.layout import CONFIG, JOURNAL, MANIFEST

    if (folder / MANIFEST).is_file():
        return
    if (folder / JOURNAL).is_file():
        raise ArtifactError(
            "is a conversion that has not ended", where=str(folder),
            hint="The same `quantkit convert` again goes on with it.",
        )  # fmt: skip
    if not (folder / CONFIG).is_file():
        raise ArtifactError(
            f"is neither an artifact nor a checkpoint: it has no {MANIFEST} and no {CONFIG}", where=str(folder)
        )


def cache_folder() -> Path:
    """Where artifacts of bundled models are."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "quantkit" / "artifacts"
