"""Verification against the source: do its tensors have the recorded digests?

A Hub states the sha256 of each shard. Where that is the digest of the same file in the publisher's view, which the
same verification reads and holds against the records tensor by tensor, there is nothing to learn from downloading
the shard, and 700 GB stay where they are.
"""

from __future__ import annotations

import os
from collections import defaultdict
from contextlib import nullcontext
from typing import TYPE_CHECKING

from ...checkpoint.tensor import TensorInfo
from ..artifact import Artifact
from ..place import Way, place_file
from ..progress import OnProgress
from .files import ByteCounter
from .findings import Findings, Section
from .records import Accounts

if TYPE_CHECKING:
    from ...checkpoint import Checkpoint


def check_source(
    artifact: Artifact, findings: Findings, accounts: Accounts, source: str | os.PathLike[str] | Checkpoint,
    *, quick: bool, on_progress: OnProgress | None,
) -> None:  # fmt: skip
    """Compare tensor by tensor; the files may be cut otherwise.

    Raises:
        SourceError, EnvironmentProblem: the source itself can't be opened or read.
    """
    from ...checkpoint import Checkpoint, open_checkpoint

    opened = nullcontext(source) if isinstance(source, Checkpoint) else open_checkpoint(source)
    with opened as checkpoint, findings.section("source") as section:
        section.summary = f"{len(checkpoint.tensors):,} tensors of {checkpoint.label} are the ones recorded"
        for name in sorted(accounts.records.keys() - checkpoint.tensors.keys()):
            section.problem("is not in the source", name)
        for name in sorted(checkpoint.tensors.keys() - accounts.records.keys()):
            section.problem("is in the source and not accounted for", name)
        common = [info for info in checkpoint.tensors.values() if info.name in accounts.records]
        for info in common:
            record = accounts.records[info.name]
            if (info.dtype, info.shape) != (record.dtype, record.shape):
                section.problem(f"is {info.dtype} {list(info.shape)} in the source", info.name)
        if not quick:
            stated = _stated_by_hub(artifact, checkpoint)
            if stated:
                section.summary += (
                    f"; {len(stated)} of {len(checkpoint.files)} files by the sha256 that the Hub states"
                )
            rest = [info for info in common if info.file not in stated]
            _compare_bytes(checkpoint, rest, accounts, section, on_progress)


def _stated_by_hub(artifact: Artifact, checkpoint: Checkpoint) -> set[str]:
    """Files that are not on this disk and whose digest, as the Hub states it, is that of the view's file."""
    views = {name: view for name, view in artifact.manifest.views.items() if view.origin == "publisher"}
    listed = artifact.manifest.files
    return {
        file
        for file, info in checkpoint.files.items()
        for name, view in views.items()
        if view.stored == "files"
        and info.etag is not None
        and (entry := listed.get(f"{name}/{file}")) is not None
        and entry.sha256 == info.etag
        and checkpoint.local_path(file) is None
    }


def _compare_bytes(
    checkpoint: Checkpoint, tensors: list[TensorInfo], accounts: Accounts, section: Section,
    on_progress: OnProgress | None,
) -> None:  # fmt: skip
    by_file: dict[str, list[TensorInfo]] = defaultdict(list)
    for info in tensors:
        by_file[info.file].append(info)
    counter = ByteCounter(sum(checkpoint.files[file].nbytes for file in by_file), on_progress)
    for file, content in by_file.items():
        path = checkpoint.fetch(file)
        read = place_file(path, None, Way.REFERENCE, content, lambda count, file=file: counter.add(file, count))  # type: ignore[misc]
        for name, sha256 in read.tensors.items():
            if sha256 != accounts.records[name].sha256:
                section.problem(f"has other bytes in the source (sha256 {sha256})", name)
        checkpoint.release(file)
