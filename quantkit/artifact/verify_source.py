"""Verification against the source: do its tensors have the recorded digests?"""

from __future__ import annotations

import os
from collections import defaultdict
from contextlib import nullcontext
from typing import TYPE_CHECKING

from ..checkpoint.tensor import TensorInfo
from .artifact import Artifact
from .findings import Findings, Section
from .place import Way, place_file
from .progress import OnProgress
from .verify_files import ByteCounter
from .verify_records import Accounts

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint


def check_source(
    artifact: Artifact, findings: Findings, accounts: Accounts, source: str | os.PathLike[str] | Checkpoint,
    *, quick: bool, on_progress: OnProgress | None,
) -> None:  # fmt: skip
    """Compare tensor by tensor; the files may be cut otherwise.

    Raises:
        SourceError, EnvironmentProblem: the source itself can't be opened or read.
    """
    from ..checkpoint import Checkpoint, open_checkpoint

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
            _compare_bytes(checkpoint, common, accounts, section, on_progress)


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
