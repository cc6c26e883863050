"""Puts a publisher's file into a view without changing a byte, by the cheapest way that is safe.

``auto`` hard-links only out of the Hub's content-addressed cache, where nobody edits files in place; elsewhere it
clones blocks (FICLONE, copy on write) and where the file system can't, copies. ``link`` hard-links on request: an
in-place edit of the source would then change the artifact too (verify finds it). Whatever the way, one in-order
read gives the file's digest and the digest of every tensor in it, and a copy is written from the very buffers
that were hashed. Symbolic links (the Hub cache is made of them) are resolved first.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from ..checkpoint.tensor import TensorInfo
from ..errors import SourceError, UsageError
from .digests import FileDigests
from .durable import disk_errors, fsync_dir
from .layout import UNFINISHED_SUFFIX
from .shard import pwrite_all, reserve, start_writeback

FICLONE = 0x40049409  # linux/fs.h, _IOW(0x94, 9, int)
READ_BYTES = 1 << 20  # stays in the cache between reading, hashing and writing


class Way(str, Enum):
    """How a file gets into a view."""

    HARDLINK = "hardlink"
    CLONE = "clone"
    COPY = "copy"
    REFERENCE = "reference"  # digests only, no bytes


@dataclass(frozen=True, slots=True)
class PlacedFile:
    """A source file read once: its size, its digest, the digest of every tensor in it."""

    nbytes: int
    sha256: str
    tensors: dict[str, str]


def choose_way(mode: str, source: Path, target_dir: Path, *, content_addressed: bool) -> Way:
    """The way that ``mode`` (auto, link, copy, reference) means for files like ``source``; creates no file.

    Raises:
        UsageError: ``link`` across file systems.
    """
    if mode == "reference":
        return Way.REFERENCE
    if mode == "copy":
        return Way.COPY
    real = source.resolve()
    same_device = real.stat().st_dev == target_dir.stat().st_dev
    if mode == "link":
        if not same_device:
            raise UsageError(
                "hard links can't cross file systems", where="--prefill link",
                accepted="auto, copy or reference", hint=f"{real.parent} and {target_dir} are on different ones",
            )  # fmt: skip
        return Way.HARDLINK
    if content_addressed and same_device:
        return Way.HARDLINK
    return Way.CLONE if same_device and _can_clone(real, target_dir) else Way.COPY


def place_file(
    source: Path,
    target: Path | None,
    way: Way,
    tensors: Sequence[TensorInfo],
    on_bytes: Callable[[int], None],
) -> PlacedFile:
    """Read a file in order, hash it and its tensors, and put it at ``target`` (None for REFERENCE).

    Args:
        on_bytes: told the length of every piece read; may raise to stop.

    Raises:
        SourceError: the source is shorter than its header says or changed while being read.
        EnvironmentProblem: the target can't be written.
    """
    fd = os.open(source.resolve(), os.O_RDONLY | os.O_CLOEXEC)
    try:
        before = os.fstat(fd)
        if target is None:
            placed = _read_through(fd, source, before.st_size, tensors, None, on_bytes)
        elif way is Way.HARDLINK:
            _link(source.resolve(), target)
            placed = _read_through(fd, source, before.st_size, tensors, None, on_bytes)
            os.fdatasync(fd)  # a download of a moment ago may not be on the disk yet
        else:
            placed = _write(fd, source, target, way, before.st_size, tensors, on_bytes)
        after = os.fstat(fd)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise SourceError("changed while it was being read", where=str(source))
    finally:
        os.close(fd)
    return placed


def _link(source: Path, target: Path) -> None:
    with disk_errors(target):
        target.unlink(missing_ok=True)
        target.hardlink_to(source)
        fsync_dir(target.parent)


def _write(
    fd: int, source: Path, target: Path, way: Way, nbytes: int,
    tensors: Sequence[TensorInfo], on_bytes: Callable[[int], None],
) -> PlacedFile:  # fmt: skip
    unfinished = target.with_name(target.name + UNFINISHED_SUFFIX)
    with disk_errors(target):
        out = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            cloned = way is Way.CLONE and _clone(fd, out)
            if not cloned:
                reserve(out, nbytes)
            placed = _read_through(fd, source, nbytes, tensors, None if cloned else out, on_bytes)
            os.fdatasync(out)
            os.posix_fadvise(out, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(out)
        unfinished.replace(target)
        fsync_dir(target.parent)
    return placed


def _read_through(
    fd: int,
    source: Path,
    nbytes: int,
    tensors: Sequence[TensorInfo],
    out: int | None,
    on_bytes: Callable[[int], None],
) -> PlacedFile:
    digests = FileDigests(tensors)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # doubles the read-ahead: a cold file comes twice as fast
    buffer = memoryview(bytearray(min(READ_BYTES, max(nbytes, 1))))
    position = 0
    while position < nbytes:
        count = os.preadv(fd, [buffer], position)
        if count == 0:
            raise SourceError(f"ends at byte {position} of {nbytes}", where=str(source))
        piece = buffer[:count]
        digests.update(piece)
        if out is not None:
            pwrite_all(out, piece, position)
            start_writeback(out, position, count)
        position += count
        on_bytes(count)
    return PlacedFile(nbytes, digests.of_file(), digests.of_tensors())


def _clone(source_fd: int, target_fd: int) -> bool:
    try:
        fcntl.ioctl(target_fd, FICLONE, source_fd)
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        return False
    return True


def _can_clone(source: Path, target_dir: Path) -> bool:
    """Try it with the file itself: cloning takes no space, and only the file system knows."""
    probe = target_dir / f"clone-probe{UNFINISHED_SUFFIX}"
    with disk_errors(probe):
        fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        try:
            out = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            try:
                return _clone(fd, out)
            finally:
                os.close(out)
                probe.unlink(missing_ok=True)
        finally:
            os.close(fd)
