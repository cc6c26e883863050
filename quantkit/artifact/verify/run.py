"""Verification: does an artifact hold what its manifest says, and do its two views belong together?

Every section goes on after a problem, so that one run names everything that is wrong. Weight files are read once:
the file's digest and the digest of every tensor in it come from the same pass.

Left out: signatures (they come with the registry), and whether the model is any good (evaluation).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..artifact import Artifact
from ..layout import FOLDS
from ..progress import OnProgress
from .amendments import check_amendments
from .files import check_attachments, check_files, check_identity, check_marks
from .findings import Findings, VerifyReport
from .folds import check_folds
from .numbers import check_engines, check_errors, check_scales, check_transforms
from .records import Accounts, check_headers, check_pairing, check_records
from .source import check_source

if TYPE_CHECKING:
    from ...checkpoint import Checkpoint


def verify_artifact(
    path: str | os.PathLike[str],
    *,
    quick: bool = False,
    against: str | os.PathLike[str] | Checkpoint | None = None,
    on_progress: OnProgress | None = None,
) -> VerifyReport:
    """Check an artifact.

    Args:
        path: its directory.
        quick: sizes, ids, headers and accounting; reads no weights.
        against: the source it was made from: its tensors are compared with the recorded digests (with ``quick``:
        their
            names, dtypes and shapes).
        on_progress: told the bytes read.

    Raises:
        ArtifactError: not an artifact at all; everything less is a problem in the report.
    """
    with Artifact.open(Path(path)) as artifact:
        findings = Findings()
        check_identity(artifact, findings)
        accounts = check_records(artifact, findings)
        check_amendments(artifact.manifest, findings, accounts)
        read = check_files(artifact, findings, quick=quick, on_progress=on_progress)
        check_attachments(artifact, findings)
        check_marks(artifact, findings)
        _check_views(artifact, findings, accounts, read, quick=quick)
        check_engines(artifact, findings)
        if against is not None:
            check_source(artifact, findings, accounts, against, quick=quick, on_progress=on_progress)
        return VerifyReport(artifact.path, findings.checks)


def _check_views(
    artifact: Artifact, findings: Findings, accounts: Accounts, read: dict[str, dict[str, str]], *, quick: bool
) -> None:
    for view in (artifact.prefill, artifact.decode):
        if view.is_reference:
            findings.skip(f"headers of {view.name}", "the view is a reference: it holds no bytes")
        else:
            check_headers(view, artifact.manifest, findings, accounts, read.get(view.name))
    check_folds(artifact, findings, accounts, read.get(FOLDS), quick=quick)
    check_pairing(artifact.manifest, findings, accounts)
    if quick:
        findings.skip("scales", "quick")
        findings.skip("error", "quick")
        return
    for view in (artifact.prefill, artifact.decode):
        if not view.is_reference:
            check_scales(view, findings)
    check_errors(artifact, findings, accounts)
    check_transforms(artifact, findings, accounts)
