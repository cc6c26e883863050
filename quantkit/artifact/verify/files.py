"""Verification of files: identity, presence, sizes, digests, strangers, attachments, marks."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from ...checkpoint.tensor import TensorInfo
from ...errors import QuantkitError
from ..artifact import Artifact
from ..attachments import read_attachments
from ..canonical import hash_file, parse_json
from ..durable import read_regular
from ..folds import Folds
from ..layout import ATTACHMENTS, FOLDS, JOURNAL, MANIFEST, MODEL_CARD, PROVENANCE, TENSORS, VIEWS
from ..manifest import FileEntry
from ..place import Way, place_file
from ..progress import OnProgress, Progress
from ..view import View, read_mark
from .findings import Findings, Section

MAX_READERS = 8


class ByteCounter:
    """Adds up bytes from many threads and reports them."""

    def __init__(self, total: int, on_progress: OnProgress | None) -> None:
        self._total, self._on_progress, self._done = total, on_progress, 0
        self._lock = threading.Lock()

    def add(self, unit: str, count: int) -> None:
        with self._lock:
            self._done += count
            if self._on_progress is not None:
                self._on_progress(Progress("verify", unit, self._done, self._total))


def check_identity(artifact: Artifact, findings: Findings) -> None:
    """pair_id against what it covers."""
    with findings.section("manifest") as section:
        manifest = artifact.manifest
        section.summary = f"format {manifest.format_version}, pair {manifest.pair_id[:16]}"
        if manifest.expected_pair_id() != manifest.pair_id:
            section.problem("pair_id does not follow from source, recipe and versions", MANIFEST)
        if set(manifest.views) != set(VIEWS):
            section.problem(f"lists the views {', '.join(sorted(manifest.views))}", MANIFEST)


def check_files(
    artifact: Artifact, findings: Findings, *, quick: bool, on_progress: OnProgress | None
) -> dict[str, dict[str, str]]:
    """Sizes and digests of all core files, and files that nobody listed.

    Returns:
        view -> tensor -> sha256 as read now; empty with ``quick``.
    """
    read: dict[str, dict[str, str]] = {view: {} for view in VIEWS}
    listed = artifact.manifest.files
    with findings.section("files") as section:
        section.summary = f"{len(listed)} files have their {'sizes' if quick else 'digests'}"
        _find_strangers(artifact, section)
        present = {
            name: entry for name, entry in listed.items() if _has_size(artifact.path / name, name, entry, section)
        }
        links = sum((artifact.path / name).stat().st_nlink > 1 for name in present)
        if links:
            section.summary += f"; {links} are hard links: an edit in place of their other name would change them"
        if quick:
            return {}
        tensors = {view.name: _tensors_by_file(view) for view in (artifact.prefill, artifact.decode)}
        if artifact.folds is not None:
            tensors[FOLDS] = _by_file(artifact.folds)
        counter = ByteCounter(sum(entry.nbytes for entry in present.values()), on_progress)

        def digest(name: str) -> None:
            view, _, file = name.partition("/")
            found = place_file(
                artifact.path / name, None, Way.REFERENCE, tensors.get(view, {}).get(file, ()),
                lambda count: counter.add(name, count),
            )  # fmt: skip
            if found.sha256 != listed[name].sha256:
                section.problem(f"sha256 is {found.sha256}, the manifest says {listed[name].sha256}", name)
            read.setdefault(view, {}).update(found.tensors)

        with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), MAX_READERS)) as pool:
            for name, job in [(name, pool.submit(digest, name)) for name in present]:
                try:
                    job.result()
                except (QuantkitError, OSError) as problem:
                    section.problem(f"cannot be read: {problem}", name)
    return read


def _has_size(path: Path, name: str, entry: FileEntry, section: Section) -> bool:
    if _leads_out(name):
        section.problem("leads out of the artifact", name)
        return False
    if not path.is_file():
        section.problem("is missing", name)
        return False
    size = path.stat().st_size
    if size != entry.nbytes:
        section.problem(f"has {size:,} bytes, the manifest says {entry.nbytes:,}", name)
        return False
    return True


def _leads_out(name: str) -> bool:
    """A listed path that is not below the artifact is never opened."""
    path = PurePosixPath(name)
    return path.is_absolute() or ".." in path.parts or "\0" in name


def _find_strangers(artifact: Artifact, section: Section) -> None:
    """Files in the views that the manifest does not list: loaders read every weight file they see."""
    known = {*artifact.manifest.files, MANIFEST, MODEL_CARD, JOURNAL, TENSORS}
    for path in sorted(artifact.path.rglob("*")):
        name = path.relative_to(artifact.path).as_posix()
        if path.is_dir() or name in known or name.startswith(f"{ATTACHMENTS}/"):
            continue
        section.problem("is not in the manifest", name)


def _tensors_by_file(view: View) -> dict[str, list[TensorInfo]]:
    """Header entries by file; nothing when the view can't be opened, which ``check_headers`` reports."""
    return {} if view.is_reference else _by_file(view)


def _by_file(files: View | Folds) -> dict[str, list[TensorInfo]]:
    by_file: dict[str, list[TensorInfo]] = defaultdict(list)
    try:
        for info in files.tensors.tensors.values():
            by_file[info.file].append(info)
    except (QuantkitError, OSError):
        return {}
    return by_file


def check_attachments(artifact: Artifact, findings: Findings) -> None:
    """Every attachment that is listed has its digest; every one that is there is listed."""
    with findings.section("attachments") as section:
        entries = {entry["path"]: entry["sha256"] for entry in read_attachments(artifact.path)}
        section.summary = f"{len(entries)} attachments have their digests"
        for path, sha256 in entries.items():
            target = artifact.path / path
            if _leads_out(path):
                section.problem("leads out of the artifact", path)
            elif not target.is_file():
                section.problem("is missing", path)
            elif hash_file(target)[0] != sha256:
                section.problem("has another digest than the list of attachments says", path)
        if f"{ATTACHMENTS}/{PROVENANCE}" in entries:
            _check_provenance(artifact, section)
        folder = artifact.path / ATTACHMENTS
        for found in sorted(folder.rglob("*")) if folder.is_dir() else ():
            name = found.relative_to(artifact.path).as_posix()
            if found.is_file() and name not in entries and name != f"{ATTACHMENTS}/attachments.json":
                section.problem("is not in the list of attachments", name)


def _check_provenance(artifact: Artifact, section: Section) -> None:
    """The statement speaks of this manifest; nothing else covers the manifest's own bytes."""
    where = f"{ATTACHMENTS}/{PROVENANCE}"
    try:
        subjects = parse_json(read_regular(artifact.path / where))["subject"]
        stated = {subject["name"]: subject["digest"]["sha256"] for subject in subjects}
    except (OSError, ValueError, KeyError, TypeError):
        section.problem("is not a provenance statement", where)
        return
    if stated.get(MANIFEST) != hash_file(artifact.path / MANIFEST)[0]:
        section.problem("was made for another manifest.json than the one here", where)


def check_marks(artifact: Artifact, findings: Findings) -> None:
    """Both views carry the pair's id and their own root."""
    with findings.section("marks") as section:
        section.summary = "both views name this pair"
        for view in (artifact.prefill, artifact.decode):
            where = f"{view.name}/quantkit_view.json"
            try:
                mark = read_mark(view.path)
            except QuantkitError as problem:
                section.problem(problem.what, where)
                continue
            if mark.view != view.name:
                section.problem(f"calls itself {mark.view!r}", where)
            if mark.pair_id != artifact.manifest.pair_id:
                section.problem(
                    f"belongs to pair {mark.pair_id[:16]}, not {artifact.manifest.pair_id[:16]}", where
                )
            if mark.tensor_root != _root_of(artifact, view):
                section.problem("states another tensor root than the manifest", where)


def _root_of(artifact: Artifact, view: View) -> str | None:
    return next((entry.tensor_root for name, entry in artifact.manifest.views.items() if name == view.name), None)
