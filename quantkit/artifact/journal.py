"""The memory of an unfinished conversion: append-only, one fsynced JSON line per finished piece.

The first line is the fingerprint of the run (plan, checkpoint, versions): a working directory never continues
under another. A line is written after the data it speaks of is durable, so what it says holds after any crash; a
torn last line is what a crash leaves and is dropped. The journal file is also the lock: two runs never share a
working directory (``flock``, released by the kernel when a process dies).

Entries after the first are dictionaries with a ``kind``; their meaning is the executor's business.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from pathlib import Path
from typing import Any

from ..errors import ArtifactError, EnvironmentProblem
from .canonical import canonical_json
from .durable import disk_errors, fsync_dir

Entry = dict[str, Any]


class Journal:
    """An open, locked journal.

    Attributes:
        entries: what earlier runs wrote, without the fingerprint.
        has_work: anything was finished, by them or by this run.

    Raises:
        EnvironmentProblem: another process works in the same directory, or the disk refuses.
        ArtifactError: the directory belongs to another plan, source or version.
    """

    def __init__(self, path: Path, fingerprint: Entry) -> None:
        self.path = path
        self._lock = threading.Lock()
        with disk_errors(path):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            self._acquire()
            lines = self._read()
            if len(lines) > 1 or (lines and lines[0] == fingerprint):
                _check_fingerprint(path, lines[0], fingerprint)
            else:  # nothing was done yet: whatever was begun here is not worth an error
                self._truncate(0)
                self._write(fingerprint)
                fsync_dir(path.parent)
            self.has_work = len(lines) > 1
            self.entries: list[Entry] = lines[1:]  # lines[0] is the fingerprint
        except BaseException:
            self.close()
            raise

    def _acquire(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            raise EnvironmentProblem(
                "another quantkit process is writing here",
                where=str(self.path.parent),
                hint="Wait for it to end, or choose another output with -o",
            ) from problem

    def _read(self) -> list[Entry]:
        size = os.fstat(self._fd).st_size
        data = b""
        while len(data) < size and (chunk := os.pread(self._fd, size - len(data), len(data))):
            data += chunk
        entries: list[Entry] = []
        good = 0
        for line in data.splitlines(keepends=True):
            entry = _parse(line)
            if entry is None:
                break
            entries.append(entry)
            good += len(line)
        if good != len(data):  # a torn line, and whatever a dying disk put after it
            self._truncate(good)
        return entries

    def _truncate(self, size: int) -> None:
        with disk_errors(self.path):
            os.ftruncate(self._fd, size)
            os.fdatasync(self._fd)

    def append(self, entry: Entry) -> None:
        """Write one line and make it durable; safe from many threads."""
        self._write(entry)
        self.has_work = True

    def _write(self, entry: Entry) -> None:
        line = canonical_json(entry) + b"\n"
        with self._lock, disk_errors(self.path):
            view = memoryview(line)
            while view:
                view = view[os.write(self._fd, view) :]
            os.fdatasync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _parse(line: bytes) -> Entry | None:
    if not line.endswith(b"\n"):
        return None
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def _check_fingerprint(path: Path, found: Entry, wanted: Entry) -> None:
    names = {
        "plan_id": "plan", "checkpoint": "source", "version": "version of quantkit",
        "calibration": "calibration set", "engine": "engine", "device": "device",
    }  # fmt: skip
    other = [say for key, say in names.items() if found.get(key) != wanted.get(key)]
    if not other and found != wanted:
        other = ["format version"]
    if other:
        raise ArtifactError(
            f"holds an unfinished conversion that was started with another {' and another '.join(other)}",
            where=str(path.parent),
            hint="Run again with what it was started with to finish it, delete the directory to start afresh, "
            "or choose another output with -o",
        )
