"""What is said about an artifact: model card, provenance, reports, evaluation results.

Attachments may hold times and figures and are added at any time; they never change the core. ``attachments.json``
lists them with their digests and only grows: a newer version of a file is a further entry, and the last one
counts.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from ...errors import ArtifactError, UsageError
from ..canonical import parse_json, readable_json, sha256_hex, utc_now
from ..durable import disk_errors, read_regular, write_file
from ..layout import ATTACHMENT_LIST, ATTACHMENTS, MODEL_CARD, PROVENANCE, REPORT_HTML, REPORT_JSON

if TYPE_CHECKING:
    from ...checkpoint import Checkpoint
    from ..artifact import Artifact
    from ..manifest import Manifest


def add_attachment(
    artifact: Artifact | Path, name: str, data: bytes, *, replace: bool = False, root: bool = False
) -> Path:
    """Write a file under ``attachments/`` and enter it into the list.

    Args:
        artifact: the artifact or its directory.
        name: file name, may contain folders (``evals/fidelity.json``).
        replace: allow a newer version of an attachment that exists.
        root: the file stands beside the manifest instead (the model card).

    Raises:
        UsageError: a name that leaves the folder, is reserved or taken.
        EnvironmentProblem: the disk refuses.
    """
    directory = artifact if isinstance(artifact, Path) else artifact.path
    path = _checked_path(name, root)
    _write(directory, {path: data}, replace=replace)
    return directory / path


def add_attachments(artifact: Artifact | Path, files: Mapping[str, bytes], *, replace: bool = False) -> Path:
    """Write several files under ``attachments/``, entered into the list together; returns that folder.

    Args:
        artifact: the artifact or its directory.
        files: name, may contain folders -> content.
        replace: allow newer versions of attachments that exist.

    Raises:
        UsageError: a name that leaves the folder, is reserved or taken; nothing was written.
        EnvironmentProblem: the disk refuses.
    """
    directory = artifact if isinstance(artifact, Path) else artifact.path
    _write(directory, {_checked_path(name, False): data for name, data in files.items()}, replace=replace)
    return directory / ATTACHMENTS


def _write(directory: Path, files: dict[str, bytes], *, replace: bool) -> None:
    """Write files (path inside the artifact -> content), then the list that names them."""
    with disk_errors(directory / ATTACHMENTS), _locked(directory / ATTACHMENTS):
        entries = read_attachments(directory)
        taken = {entry["path"] for entry in entries} & files.keys()
        if taken and not replace:
            raise UsageError(f"attachment {min(taken)!r} exists", where=str(directory), accepted="a new name")
        added = utc_now()
        for path, data in files.items():
            target = directory / path
            target.parent.mkdir(parents=True, exist_ok=True)
            write_file(target, data)
            entries.append({"path": path, "nbytes": len(data), "sha256": sha256_hex(data), "added": added})
        write_file(directory / ATTACHMENTS / ATTACHMENT_LIST, readable_json({"attachments": entries}))


def read_attachments(directory: Path) -> list[dict[str, Any]]:
    """All entries of the list, oldest first; empty when there is no list.

    Raises:
        ArtifactError: the list is damaged.
    """
    path = directory / ATTACHMENTS / ATTACHMENT_LIST
    if not path.exists():
        return []
    try:
        entries = parse_json(read_regular(path))["attachments"]
        if not all(isinstance(e["path"], str) and isinstance(e["sha256"], str) for e in entries):
            raise ValueError("an entry lacks path or sha256")
    except (ValueError, KeyError, TypeError) as problem:
        raise ArtifactError(f"is not a list of attachments ({problem})", where=str(path)) from problem
    return list(entries)


def write_first_attachments(
    directory: Path, manifest: Manifest, checkpoint: Checkpoint, *, plan_id: str, recipe_repo: str | None,
    device: str = "cpu",
) -> None:  # fmt: skip
    """What every conversion leaves: provenance, report, model card.

    Args:
        recipe_repo: repository that the recipe was written for; names the base model of a local source.
        device: that computed.
    """
    from ..records import read_records
    from .model_card import render_card
    from .provenance import render_provenance
    from .report import build_report
    from .report_html import render_html

    report = build_report(manifest, read_records(directory))
    base = manifest.source.label if manifest.source.kind == "hub" else recipe_repo
    base = base if base and "/" in base else None  # bundled models have no page to link to
    under = f"{ATTACHMENTS}/"
    files = {
        under + PROVENANCE: render_provenance(directory, manifest, plan_id, checkpoint, device),
        under + REPORT_JSON: readable_json(report), under + REPORT_HTML: render_html(report),
        MODEL_CARD: render_card(manifest, report, base),
    }  # fmt: skip
    (directory / ATTACHMENTS / ATTACHMENT_LIST).unlink(missing_ok=True)  # of an earlier, interrupted finish
    _write(directory, files, replace=True)


def _checked_path(name: str, root: bool) -> str:
    path = PurePosixPath(name)
    bad = path.is_absolute() or ".." in path.parts or not path.name or "\0" in name or "\\" in name
    if bad or path.name == ATTACHMENT_LIST:
        raise UsageError(f"{name!r} cannot be the name of an attachment", accepted="a relative file name")
    if root and name != MODEL_CARD:
        raise UsageError(f"{name!r} cannot stand beside the manifest", accepted=MODEL_CARD)
    return name if root else f"{ATTACHMENTS}/{path}"


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    directory.mkdir(parents=True, exist_ok=True)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
