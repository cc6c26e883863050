"""A shard while its jobs are being done, in any order and by many threads, and what the journal knows of it.

Data are made durable before the journal speaks of them: a flush takes what is finished, syncs the file, then
writes one line. Flushing every ``FLUSH_BYTES`` rather than per tensor keeps the disk busy with large writes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping
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

    Args:
        held: see ``is_held``.
        known: gives the tensors whose bytes are known before their jobs run.

    Attributes:
        results: job index -> result, for the jobs that are done.
        digest: the finished file, None before.
        is_held: it does not become final, and its sources are not let go, before ``release``.
    """

    def __init__(
        self, shard: Shard, work: Path, journal: Journal, on_durable: Callable[[Iterable[Job]], None],
        *, held: bool = False, known: Callable[[], Mapping[str, bytes]] = dict,
    ) -> None:  # fmt: skip
        self.shard, self.is_held = shard, held
        self.name = view_path(shard.view, shard.file)
        self.path = work / shard.view / shard.file
        self.results: dict[int, JobResult] = {}
        self.digest: FileDigest | None = None
        self._journal, self._on_durable, self._known = journal, on_durable, known
        self._waiting: list[Job] = []  # journalled while held
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
            for result in self.results.values():
                writer.settle(result.outputs)

    @property
    def is_complete(self) -> bool:
        """All jobs are done; the file may still be unfinished."""
        return len(self.results) == len(self.shard.jobs)

    def restored(self) -> None:
        """Call after ``restore``: lets go of the sources of jobs that are done."""
        self._let_go(self.results)

    def release(self) -> None:
        """The layer stays as it is planned: finish the file if everything is done, or as soon as it is."""
        with self._lock:
            self.is_held = False
            waiting, self._waiting = self._waiting, []
            complete = self.is_complete and self.digest is None
        self._on_durable(waiting)
        if complete:
            self.finish()

    def remove(self) -> None:
        """The layer is planned anew: nothing of the file stays. No thread is at work on it any more."""
        self.close()
        with disk_errors(self.path):
            self.path.with_name(self.path.name + UNFINISHED_SUFFIX).unlink(missing_ok=True)

    def writer(self) -> ShardWriter:
        with self._lock:
            if self._writer is None:
                self._writer = ShardWriter(self.path, self.shard.tensors)
                self._writer.preset(self._known())
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
            if self._writer is not None:
                self._writer.settle(result.outputs)
            complete = self.is_complete
            finish = complete and not self.is_held
            flush = complete or self._fresh_bytes >= FLUSH_BYTES
        if finish:
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
                self._let_go(fresh)

    def finish(self) -> None:
        with self._flush_lock:
            self.digest = self.writer().finish()
            fresh = self._take_fresh()
            self._journal.append({
                "kind": "shard", "shard": self.name, "nbytes": self.digest.nbytes, "sha256": self.digest.sha256,
                "done": self._lines(fresh),
            })  # fmt: skip
            self._let_go(fresh)

    def _let_go(self, indices: Iterable[int]) -> None:
        """These jobs are journalled; while held, their sources may be needed once more."""
        jobs = [self.shard.jobs[i] for i in indices]
        with self._lock:
            if self.is_held:
                self._waiting += jobs
                return
        self._on_durable(jobs)

    def _take_fresh(self) -> list[int]:
        with self._lock:
            fresh, self._fresh, self._fresh_bytes = self._fresh, [], 0
            return fresh

    def _lines(self, indices: Iterable[int]) -> list[list[Any]]:
        return [[i, *self.results[i].to_line()] for i in indices]

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
