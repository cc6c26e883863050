"""A shard while its jobs are being done, in any order and by many threads, and what the journal knows of it.

Data are made durable before the journal speaks of them: a flush takes what is finished, syncs the file, then
writes one line. Flushing every ``FLUSH_BYTES`` rather than per tensor keeps the disk busy with large writes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

from ..artifact.canonical import hash_file
from ..artifact.durable import disk_errors
from ..artifact.journal import Entry, Journal
from ..artifact.layout import UNFINISHED_SUFFIX, view_path
from ..artifact.shard import FileDigest, ShardWriter, tensor_offsets
from ..plan.fate import Job, Shard
from ..scheme import OutputTensor
from .ops import JobResult

FLUSH_BYTES = 256 << 20


class ShardState:
    """One shard of the plan.

    Attributes:
        results: job index -> result, for the jobs that are done.
        digest: the finished file, None before.
    """

    def __init__(
        self, shard: Shard, work: Path, journal: Journal, on_durable: Callable[[Iterable[Job]], None]
    ) -> None:
        self.shard = shard
        self.name = view_path(shard.view, shard.file)
        self.path = work / shard.view / shard.file
        self.results: dict[int, JobResult] = {}
        self.digest: FileDigest | None = None
        self._journal, self._on_durable = journal, on_durable
        self._writer: ShardWriter | None = None
        self._offsets: dict[str, int] | None = None
        self._fresh: list[int] = []  # done, not yet journalled
        self._fresh_bytes = 0
        self._lock = threading.Lock()
        self._flush_lock = threading.Lock()

    def restore(self, entries: Iterable[Entry]) -> None:
        """Take over what an earlier run journalled, as far as the disk agrees.

        A finished file is trusted at its size (``verify`` reads it); tensors of an unfinished one are hashed
        again.
        """
        known: dict[int, JobResult] = {}
        finished: FileDigest | None = None
        for entry in entries:
            for index, *result in entry["done"]:
                known[index] = JobResult(*result)
            if entry["kind"] == "shard":
                finished = FileDigest(entry["nbytes"], entry["sha256"])
        if finished and len(known) == len(self.shard.jobs) and _size(self.path) == finished.nbytes:
            self.results, self.digest = known, finished
            return
        if self.path.exists():  # renamed, but the crash came before the journal line
            self.path.replace(self.path.with_name(self.path.name + UNFINISHED_SUFFIX))
        if not known:
            return
        writer = self.writer()
        if writer.resumed:
            self.results = {
                index: result
                for index, result in known.items()
                if all(writer.rehash(name) == sha256 for name, sha256 in result.outputs.items())
            }

    def writer(self) -> ShardWriter:
        with self._lock:
            if self._writer is None:
                self._writer = ShardWriter(self.path, self.shard.tensors)
            return self._writer

    def read(self, tensor: OutputTensor) -> bytes:
        """The bytes of a tensor whose job is done, from the file as it is now. Any thread."""
        with self._lock:
            if self._offsets is None:
                self._offsets = tensor_offsets(self.shard.tensors)
        with disk_errors(self.path), _open_either(self.path) as handle:
            handle.seek(self._offsets[tensor.name])
            return handle.read(tensor.nbytes)

    def done(self, index: int, result: JobResult) -> None:
        """A job was written; flushes or finishes the file when it is time. Any thread."""
        with self._lock:
            self.results[index] = result
            self._fresh.append(index)
            self._fresh_bytes += self.shard.jobs[index].nbytes
            complete = len(self.results) == len(self.shard.jobs)
            flush = self._fresh_bytes >= FLUSH_BYTES
        if complete:
            self.finish()
        elif flush:
            self.flush()

    def flush(self) -> None:
        """Make finished jobs durable and journal them."""
        with self._flush_lock:
            fresh = self._take_fresh()
            if fresh and self._writer is not None:
                self._writer.sync()
                self._journal.append({"kind": "jobs", "shard": self.name, "done": self._lines(fresh)})
                self._on_durable(self.shard.jobs[i] for i in fresh)

    def finish(self) -> None:
        with self._flush_lock:
            self.digest = self.writer().finish()
            fresh = self._take_fresh()
            self._journal.append({
                "kind": "shard", "shard": self.name, "nbytes": self.digest.nbytes, "sha256": self.digest.sha256,
                "done": self._lines(fresh),
            })  # fmt: skip
            self._on_durable(self.shard.jobs[i] for i in fresh)

    def _take_fresh(self) -> list[int]:
        with self._lock:
            fresh, self._fresh, self._fresh_bytes = self._fresh, [], 0
            return fresh

    def _lines(self, indices: Iterable[int]) -> list[list[Any]]:
        found = ((i, self.results[i]) for i in indices)
        return [
            [i, r.outputs, r.relative_error, *([] if r.calibration is None else [r.calibration])] for i, r in found
        ]

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def place_is_intact(path: Path, sha256: str) -> bool:
    """Whether a placed file reads back as what was hashed."""
    return hash_file(path)[0] == sha256


def _open_either(path: Path) -> BinaryIO:
    """A shard that is unfinished, or finished, perhaps just now by another thread."""
    with contextlib.suppress(FileNotFoundError):
        return open(path.with_name(path.name + UNFINISHED_SUFFIX), "rb")
    return open(path, "rb")


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1
