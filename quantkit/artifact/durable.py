"""Small files written so that a reader sees the old content or the new, never half of it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import EnvironmentProblem
from ..units import format_bytes
from .layout import UNFINISHED_SUFFIX

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNSUITABLE = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG,
    errno.ELOOP,
)  # fmt: skip


def fsync_dir(path: Path) -> None:
    """Make renames and links in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_file(path: Path, data: bytes, *, sync_dir: bool = True) -> None:
    """Write, fsync, rename, fsync the directory (or leave that to the caller, who writes more files into it).

    The mode is what the umask says.
    """
    unfinished = path.with_name(path.name + UNFINISHED_SUFFIX)
    with disk_errors(path), open(unfinished, "wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
    unfinished.replace(path)
    if sync_dir:
        fsync_dir(path.parent)


def read_regular(path: Path) -> bytes:
    """A small file's bytes; what is no regular file is refused, since reading a pipe would wait for ever.

    Raises:
        OSError: it can't be read.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "no regular file", str(path))
    return path.read_bytes()


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn the system's errors while writing ``path`` into one that says what to do."""
    try:
        yield
    except OSError as problem:
        raise as_environment_problem(problem, path) from problem


def as_environment_problem(problem: OSError, path: Path) -> EnvironmentProblem:
    if problem.errno in _FULL:
        stats = os.statvfs(path.parent)
        free = format_bytes(stats.f_bavail * stats.f_frsize)
        return EnvironmentProblem(
            f"no space left while writing ({problem.strerror}; {free} free)",
            where=str(path),
            hint="Free space and run the same command again: it resumes where it stopped",
        )
    if problem.errno in _UNSUITABLE:
        return EnvironmentProblem(
            f"cannot write here ({problem.strerror})", where=str(path), hint="Choose another place with -o"
        )
    return EnvironmentProblem(
        f"writing failed ({problem.strerror or problem})",
        where=str(path),
        hint="Run the same command again to resume once the cause is gone",
    )
