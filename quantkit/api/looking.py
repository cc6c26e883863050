"""Looking at checkpoints and artifacts: verified, described, compared."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from .kernels import check_kernels
from .sources import PathLike, open, open_side, open_view

if TYPE_CHECKING:
    from ..artifact import Artifact, VerifyReport
    from ..artifact.progress import OnProgress
    from ..checkpoint import Checkpoint
    from ..inspection.conversions import Comparison
    from ..inspection.diff import Difference
    from ..inspection.diff import OnProgress as OnDiffProgress
    from ..inspection.inspect import Inspection
    from ..inspection.stats import TensorStatistics


def verify(
    path: PathLike,
    *,
    quick: bool = False,
    against: PathLike | Checkpoint | None = None,
    on_progress: OnProgress | None = None,
) -> VerifyReport:
    """Check an artifact; findings are in the report, not exceptions.

    Args:
        quick: headers and manifest only, no data.
        against: also compare with this source.

    Raises:
        ArtifactError: not an artifact at all.
    """
    from ..artifact import verify_artifact

    check_kernels()
    if isinstance(against, (str, os.PathLike)):
        with open(against) as checkpoint:
            return verify_artifact(path, quick=quick, against=checkpoint, on_progress=on_progress)
    return verify_artifact(path, quick=quick, against=against, on_progress=on_progress)


def inspect(source: PathLike | Checkpoint | Artifact, *, revision: str | None = None) -> Inspection:
    """Describe a checkpoint, view or artifact from its headers; see ``quantkit.inspection.inspect``."""
    from ..artifact import Artifact
    from ..inspection.inspect import describe_artifact, describe_checkpoint, is_artifact

    if isinstance(source, Artifact):
        return describe_artifact(source)
    if not isinstance(source, (str, os.PathLike)):
        return describe_checkpoint(source)
    if is_artifact(source):
        with Artifact.open(source) as artifact:
            return describe_artifact(artifact)
    with open(source, revision=revision) as checkpoint:
        return describe_checkpoint(checkpoint)


def tensor_statistics(source: PathLike, name: str, *, revision: str | None = None) -> TensorStatistics:
    """Statistics and histogram of one tensor, of an artifact: of its decode view; see ``inspection.stats``."""
    from ..inspection.stats import tensor_statistics as statistics

    check_kernels()
    with open_view(source, revision=revision) as checkpoint:
        return statistics(checkpoint, name)


def diff(
    a: PathLike, b: PathLike, *, quick: bool = False, on_progress: OnDiffProgress | None = None
) -> Difference:
    """Compare two checkpoints or views tensor by tensor (an artifact stands for its decode view).

    Raises:
        UsageError, SourceError: one of them is not there or damaged.
    """
    from ..inspection.diff import compare

    if not quick:
        check_kernels()
    with open_side(a) as (first, first_folds), open_side(b) as (second, second_folds):
        return compare(first, second, quick=quick, on_progress=on_progress, folds=(first_folds, second_folds))


def report(path: PathLike) -> dict[str, Any]:
    """Errors, and tokens of calibrated experts, of a conversion, JSON-ready: what its report.json holds.

    Raises:
        ArtifactError: not an artifact, or its records are damaged.
    """
    from ..artifact import Artifact
    from ..inspection.conversions import report_conversion

    with Artifact.open(path) as artifact:
        return report_conversion(artifact)


def compare(a: PathLike, b: PathLike) -> Comparison:
    """Compare the errors of two conversions of one source; see ``quantkit.inspection.conversions``.

    Raises:
        UsageError: they were made from different tensors.
        ArtifactError: one is not an artifact, or its records are damaged.
    """
    from ..artifact import Artifact
    from ..inspection.conversions import compare_conversions

    with Artifact.open(a) as first, Artifact.open(b) as second:
        return compare_conversions(first, second)
