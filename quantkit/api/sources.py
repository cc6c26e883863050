"""Opening what a name, a path or a Hub repository stands for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..naming import resolve

if TYPE_CHECKING:
    from ..artifact.folds import Folds
    from ..checkpoint import Checkpoint

PathLike = str | os.PathLike[str]


def open(source: PathLike, *, revision: str | None = None) -> Checkpoint:
    """Open a checkpoint; index and headers are read, no data.

    Args:
        source: see ``quantkit.naming``.
        revision: branch, tag or commit of a Hub repository.

    Raises:
        UsageError: there is nothing of this name.
        SourceError: the checkpoint is incomplete, corrupt or of a kind that cannot be read.
        EnvironmentProblem: disk, permissions or network.
    """
    from ..checkpoint import open_checkpoint

    found = resolve(source, revision=revision)
    return open_checkpoint(found.source, revision=found.revision)


@contextmanager
def open_view(source: PathLike, *, revision: str | None = None) -> Iterator[Checkpoint]:
    """``open``, and an artifact's directory stands for its decode view."""
    from ..artifact import Artifact
    from ..inspection.inspect import is_artifact

    if is_artifact(source):
        with Artifact.open(source) as artifact:
            yield artifact.decode.tensors
        return
    with open(source, revision=revision) as checkpoint:
        yield checkpoint


@contextmanager
def open_side(source: PathLike) -> Iterator[tuple[Checkpoint, Folds | None]]:
    """``open_view`` with the folds of a decode view, which the view itself does not hold."""
    from ..artifact import Artifact
    from ..artifact.layout import DECODE
    from ..inspection.inspect import is_artifact

    path = Path(source)
    artifact_of = path if is_artifact(source) else path.parent if path.name == DECODE else None
    if artifact_of is not None and is_artifact(artifact_of):
        with Artifact.open(artifact_of) as artifact:
            yield artifact.decode.tensors, artifact.folds
        return
    with open(source) as checkpoint:
        yield checkpoint, None
