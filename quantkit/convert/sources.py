"""The publisher's files: fetched when first needed, read once in order, placed, let go when nothing needs them.

One read of a file gives its digest, the digest of every tensor in it, and (where it is copied) the copy. A file is
let go, from the page cache or with ``consume`` from the Hub cache, when it is placed and every job that reads it
is journalled: a crash at any point still finds what it needs. Should a resumed run need a consumed file once more
(a torn output tensor is made again), it reads the copy in the view, after checking it, instead of downloading.
"""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ..artifact.journal import Entry, Journal
from ..artifact.place import PlacedFile, Way, choose_way, place_file
from ..checkpoint.tensor import TensorInfo
from ..errors import EnvironmentProblem, SourceError
from ..plan.fate import Job, Shard
from .progress import Ticker
from .shards import place_is_intact

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint

_SHA256 = re.compile(r"[0-9a-f]{64}")
_PROBES = 16


class SourceFiles:
    """All weight files of the source during one conversion.

    Args:
        view_dir: the view that receives the publisher's files; None when both views are derived.
        mode: ``auto``, ``link``, ``copy`` or ``reference``.
        consume: delete files from the Hub cache when they are no longer needed.
    """

    def __init__(
        self, checkpoint: Checkpoint, shards: Iterable[Shard], journal: Journal, *,
        view_dir: Path | None, mode: str, consume: bool,
    ) -> None:  # fmt: skip
        self.checkpoint, self._journal = checkpoint, journal
        self.view_dir, self._mode, self._consume = view_dir, mode, consume
        self.placed: dict[str, PlacedFile] = {}
        self._tensors: dict[str, list[TensorInfo]] = {file: [] for file in checkpoint.files}
        for info in checkpoint.tensors.values():
            self._tensors[info.file].append(info)
        self._users: Counter[str] = Counter(dict.fromkeys(checkpoint.files, 1))
        for shard in shards:
            for job in shard.jobs:
                self._users.update(self.files_of(job))
        self._locks = {file: threading.Lock() for file in checkpoint.files}
        self._absent: set[str] = set()  # to be downloaded, while the work goes on
        self._users_lock = threading.Lock()
        # Pages that were warm before stay: dropping them would slow down whoever uses the source besides us.
        self._warm = {file for file in checkpoint.files if (path := self._stable_path(file)) and _is_cached(path)}
        self._stats = {file: _stat(path) for file in checkpoint.files if (path := self._stable_path(file))}

    @property
    def stored(self) -> str:
        """How the publisher's view is stored: ``files`` or ``reference``."""
        return "reference" if self._mode == "reference" else "files"

    def files_of(self, job: Job) -> set[str]:
        return {self.checkpoint.tensors[name].file for name in job.sources}

    def restore(self, entries: Iterable[Entry]) -> None:
        """Take over journalled files that are still in place."""
        for entry in entries:
            target = self._target(entry["file"])
            if target is None or (target.is_file() and target.stat().st_size == entry["nbytes"]):
                self.placed[entry["file"]] = PlacedFile(entry["nbytes"], entry["sha256"], entry["tensors"])
        for file in self.placed:
            self._release(file)

    def ready(self) -> int:
        """Call once all journal entries are taken over, before any work.

        Returns:
            Bytes that are left to download.
        """
        for file, placed in list(self.placed.items()):
            target = self._target(file)
            if target is None or self.checkpoint.local_path(file) is not None:
                continue
            if self._users[file] > 0 and not place_is_intact(target, placed.sha256):
                del self.placed[file]
                self._users[file] += 1
            else:
                self.checkpoint.adopt(file, target)
        needed = (file for file in self.checkpoint.files if self._users[file] > 0)
        self._absent = {file for file in needed if self.checkpoint.local_path(file) is None}
        return sum(self.checkpoint.files[file].nbytes for file in self._absent)

    def fetch(self, file: str, ticker: Ticker) -> Path:
        """Have a file on disk; the first to need it downloads it."""
        with self._locks[file]:
            ticker.check()
            if file not in self._absent:
                return self.checkpoint.fetch(file)
            left = self.checkpoint.files[file].nbytes

            def count(nbytes: int) -> None:
                nonlocal left
                ticker.add("download", file, min(nbytes, left))
                left -= min(nbytes, left)

            path = self.checkpoint.fetch(file, count)
            self._absent.discard(file)
            count(left)
            return path

    def place(self, file: str, ticker: Ticker) -> None:
        """Read a file in order, digest it, place it, journal it."""
        path = self.fetch(file, ticker)
        target = self._target(file)
        way = Way.REFERENCE
        if target is not None and self.view_dir is not None:
            way = choose_way(self._mode, path, self.view_dir, content_addressed=self.checkpoint.kind == "hub")
        placed = place_file(path, target, way, self._tensors[file], lambda n: ticker.add("sources", file, n))
        self._check_etag(file, placed, path)
        written = self._consume and way in (Way.COPY, Way.CLONE)  # a hard link is what was just read
        if written and target is not None and not place_is_intact(target, placed.sha256):
            raise EnvironmentProblem("reads back other bytes than were written", where=str(target),
                                     hint="Check the disk; nothing was deleted")  # fmt: skip
        if target is not None:
            self.checkpoint.adopt(file, target)
        self.placed[file] = placed
        self._journal.append({
            "kind": "source", "file": file, "nbytes": placed.nbytes, "sha256": placed.sha256,
            "tensors": placed.tensors,
        })  # fmt: skip
        self._release(file)

    def _check_etag(self, file: str, placed: PlacedFile, path: Path) -> None:
        etag = self.checkpoint.files[file].etag
        if etag and _SHA256.fullmatch(etag) and etag != placed.sha256:
            raise SourceError(f"has sha256 {placed.sha256}, the hub states {etag}", where=file,
                              hint=f"The download is damaged: delete {path} and run again")  # fmt: skip

    def jobs_durable(self, jobs: Iterable[Job]) -> None:
        """Jobs were journalled; lets go of files that nothing needs any more."""
        for job in jobs:
            for file in self.files_of(job):
                self._release(file)

    def replace_jobs(self, before: Iterable[Job], after: Iterable[Job]) -> None:
        """Jobs that were never told to be durable are done no more, others are to be done instead."""
        with self._users_lock:
            for job in after:
                self._users.update(self.files_of(job))
        self.jobs_durable(before)

    def _release(self, file: str) -> None:
        with self._users_lock:
            self._users[file] -= 1
            last = self._users[file] == 0
        if not last:
            return
        if file not in self._warm:
            self.checkpoint.release(file)
        if self._consume and self.checkpoint.local_path(file) is not None:
            self.checkpoint.consume(file)

    def tensor_digests(self) -> dict[str, str]:
        """sha256 of every source tensor; complete once all files are placed."""
        return {name: sha256 for placed in self.placed.values() for name, sha256 in placed.tensors.items()}

    def check_unchanged(self) -> None:
        """Raises SourceError when a local file was written to since the conversion began."""
        for file, before in self._stats.items():
            path = self._stable_path(file)
            if path is None or _stat(path) != before:
                raise SourceError("changed while it was being converted", where=file,
                                  hint="Delete the .partial directory and convert again")  # fmt: skip

    def _stable_path(self, file: str) -> Path | None:
        return None if self.checkpoint.kind == "hub" else self.checkpoint.local_path(file)

    def _target(self, file: str) -> Path | None:
        return None if self.view_dir is None or self._mode == "reference" else self.view_dir / file

    def placed_paths(self) -> frozenset[Path]:
        """Files already in place in the view."""
        return frozenset(path for file in self.placed if (path := self._target(file)) is not None)

    def space_needed(self) -> int:
        """Upper bound of the bytes that placing and downloading the rest will take on the target's disk."""
        cache = self.checkpoint.download_dir
        shared = cache is not None and cache.stat().st_dev == self._journal.path.stat().st_dev
        total = 0
        for file, info in self.checkpoint.files.items():
            path = self.checkpoint.local_path(file)
            target = self._target(file)
            if file in self.placed:
                continue
            if path is None and shared:
                total += info.nbytes
            if target is None or (path is None and cache is None):
                continue
            way = choose_way(
                self._mode, path or cache or target, target.parent,
                content_addressed=self.checkpoint.kind == "hub",
            )  # fmt: skip
            copied = way is Way.COPY and not (path is None and shared and self._consume)
            total += info.nbytes if copied else 0
        return total


def _stat(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino


def _is_cached(path: Path) -> bool:
    """Whether most of a file is in the page cache, judged by reads that refuse to touch the disk."""
    size = path.stat().st_size
    probe = bytearray(1)
    hits = 0
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for place in range(_PROBES):
            try:
                hits += os.preadv(fd, [probe], size * (2 * place + 1) // (2 * _PROBES), os.RWF_NOWAIT)
            except OSError:  # EAGAIN: not cached; or a file system that can't tell
                continue
    finally:
        os.close(fd)
    return 2 * hits > _PROBES
