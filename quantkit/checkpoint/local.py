"""Files of a checkpoint on the local disk.

``pread`` on cached descriptors rather than mmap: resident memory stays flat over hundreds of gigabytes, and a
file that shrinks under us is an error message instead of a bus error. The number of open descriptors is
bounded, because a checkpoint may have hundreds of shards and a process 1,024 descriptors.

Left out: symbolic links to directories are not followed (loops); links to files are, since the snapshots of
the Hugging Face cache consist of them.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from types import MappingProxyType

from ..errors import EnvironmentProblem, QuantkitError, SourceError, UnsupportedError, UsageError

MAX_OPEN_FILES = 64
_NOT_THERE = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR)
MAX_FILES = 20_000  # more is no checkpoint but somebody's home folder
_READ_LIMIT = 1 << 30  # Linux reads at most 2 GiB - 4 KiB in one call


@dataclass(slots=True)
class _OpenFile:
    fd: int
    users: int = 0


class LocalStore:
    """A directory, or a single file together with the ``config.json`` beside it.

    Args:
        path: directory or file.
        label: what the user calls it; the path as given by default.
        kind: ``local`` or ``bundled``.

    Raises:
        SourceError: the path does not exist, or a symbolic link in it leads nowhere.
        UnsupportedError: the folder holds so many files that it can't be a checkpoint.
    """

    revision: str | None = None
    parallel_reads = 1
    download_dir: Path | None = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        label: str | None = None,
        kind: str = "local",
        max_open: int = MAX_OPEN_FILES,
    ) -> None:
        self.label, self.kind = label or os.fspath(path), kind
        self.warnings: tuple[str, ...] = ()
        target = Path(path)
        if target.is_dir():
            self.root = target
            sizes = {}
            for name, size in _walk(target, ""):
                sizes[name] = size
                if len(sizes) > MAX_FILES:
                    raise UnsupportedError(
                        f"holds more than {MAX_FILES:,} files, which is no checkpoint", where=os.fspath(path)
                    )
        elif target.is_file():
            self.root = target.parent
            sizes = {target.name: target.stat().st_size}
            config = self.root / "config.json"
            if config.is_file():
                sizes[config.name] = config.stat().st_size
            self.warnings = (
                f"only {target.name} and config.json are read; give the folder to have its tokenizer too",
            )
        else:
            raise _no_source(target)
        self._sizes = MappingProxyType(dict(sorted(sizes.items())))
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _OpenFile] = OrderedDict()
        self._max_open = max_open
        self._closed = False

    def names(self) -> Mapping[str, int]:
        return self._sizes

    def etag(self, name: str) -> str | None:
        self._check(name)
        return None

    def read_at(self, name: str, offset: int, length: int) -> bytes:
        buffer = bytearray(length)
        self.readinto(name, offset, memoryview(buffer))
        return bytes(buffer)

    def readinto(self, name: str, offset: int, buffer: memoryview) -> None:
        view = buffer.cast("B")
        with self._descriptor(name) as fd:
            done = 0
            while done < len(view):
                try:
                    count = os.preadv(fd, [view[done : done + _READ_LIMIT]], offset + done)
                except OSError as error:
                    raise _os_problem(error, self.root / name) from error
                if count == 0:
                    raise SourceError(
                        f"ends at byte {offset + done:,}; bytes {offset:,} to {offset + len(view):,} are needed",
                        where=os.fspath(self.root / name),
                        hint="The file is truncated: download or copy it again.",
                    )
                done += count

    def local_path(self, name: str, download: bool = False) -> Path | None:
        return self.fetch(name)

    def fetch(self, name: str, on_bytes: Callable[[int], None] | None = None) -> Path:
        self._check(name)
        return self.root / name

    def adopt(self, name: str, path: Path) -> None:
        self._check(name)

    def drop_cache(self, name: str) -> None:
        if hasattr(os, "posix_fadvise"):
            with self._descriptor(name) as fd:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def consume(self, name: str) -> None:
        raise UsageError(
            f"{name} is a local file, which quantkit never deletes",
            where=self.label,
            hint="Consuming is for hub sources, whose files can be downloaded again.",
        )

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._evict(keep=0)

    def _check(self, name: str) -> None:
        if name not in self._sizes:
            raise SourceError(f"has no file {name!r}", where=self.label)

    @contextmanager
    def _descriptor(self, name: str) -> Iterator[int]:
        """A descriptor that stays open while it is used, whatever other threads open or close."""
        self._check(name)
        with self._lock:
            if self._closed:
                raise UsageError("the checkpoint was closed before this read", where=self.label)
            entry = self._open.get(name)
            if entry is None:
                try:
                    entry = _OpenFile(os.open(self.root / name, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)))
                except OSError as error:
                    raise _os_problem(error, self.root / name) from error
                self._open[name] = entry
            self._open.move_to_end(name)
            entry.users += 1
            self._evict(self._max_open)
        try:
            yield entry.fd
        finally:
            with self._lock:
                entry.users -= 1
                if self._closed:
                    self._evict(keep=0)

    def _evict(self, keep: int) -> None:
        """Close the descriptors used longest ago; those in use right now stay. The lock is held."""
        for name in [n for n, entry in self._open.items() if not entry.users]:
            if len(self._open) <= keep:
                return
            os.close(self._open.pop(name).fd)


def _walk(folder: Path, prefix: str) -> Iterator[tuple[str, int]]:
    """Regular files below a folder with their sizes; hidden files and folders are left out."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise _os_problem(error, folder) from error
    for entry in entries:
        if entry.name.startswith("."):
            continue
        path = folder / entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(path, f"{prefix}{entry.name}/")
            continue
        try:
            status = path.stat()
        except OSError as error:
            broken = entry.is_symlink() and error.errno in _NOT_THERE
            raise (_broken(path) if broken else _os_problem(error, path)) from error
        if S_ISREG(status.st_mode):
            yield prefix + entry.name, status.st_size


def _no_source(path: Path) -> SourceError:
    if path.exists():
        return UnsupportedError(
            "is a pipe, socket or device, which cannot be read at any place", where=os.fspath(path),
            accepted="a folder or a regular .safetensors file",
        )  # fmt: skip
    return _broken(path) if path.is_symlink() else SourceError("no such file or directory", where=os.fspath(path))


def _broken(link: Path) -> SourceError:
    return SourceError(
        f"symbolic link leads nowhere (its target is {link.readlink()})",
        where=os.fspath(link),
        hint="Restore the target or download the checkpoint again.",
    )


def _os_problem(error: OSError, path: Path) -> QuantkitError:
    """A missing file is the source's fault, everything else (permissions, I/O, descriptors) the machine's."""
    kind = SourceError if error.errno in _NOT_THERE else EnvironmentProblem
    return kind(f"cannot be read: {error.strerror}", where=os.fspath(path))
