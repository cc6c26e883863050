"""Where the files of a checkpoint come from: the seam between reading and a directory or a hub.

Everything above this seam (headers, index, scales, planning, conversion) asks for byte ranges of named files
and never opens a path itself, so that a hub source can answer headers by HTTP range requests and a local one
by ``pread``. The seam knows nothing of safetensors.

Rules for every implementation: methods may be called from any thread; a read returns exactly the bytes asked
for or raises; names are those of ``names()``, with ``/`` as separator, never absolute and never with ``..``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable


@runtime_checkable
class FileStore(Protocol):
    """Named files that can be read by ranges.

    Errors: ``SourceError`` when a file is missing, shorter than asked for or leads nowhere;
    ``EnvironmentProblem`` when the disk, the permissions or the network are the reason.
    """

    @property
    def label(self) -> str:
        """What the user calls the source: a path, a bundled name or a hub id."""
        ...

    @property
    def kind(self) -> str:
        """``local``, ``hub`` or ``bundled``."""
        ...

    @property
    def revision(self) -> str | None:
        """Commit hash of a hub source, else None."""
        ...

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know about where the files come from."""
        ...

    @property
    def parallel_reads(self) -> int:
        """How many reads at once pay off when headers are read (1 on a disk, more over a network)."""
        ...

    def names(self) -> Mapping[str, int]:
        """File names and their sizes in bytes, as they were when the store was opened, sorted by name."""
        ...

    def etag(self, name: str) -> str | None:
        """Content identity that the hub states for a file (sha256 for large files), None for local files."""
        ...

    def read_at(self, name: str, offset: int, length: int) -> bytes:
        """``length`` bytes of the file from ``offset``; never fewer."""
        ...

    def readinto(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill all of ``buffer`` (writable, contiguous bytes) from ``offset``."""
        ...

    def local_path(self, name: str, download: bool = False) -> Path | None:
        """Path of the complete file on disk; None when it is not there and ``download`` is False."""
        ...

    def fetch(self, name: str, on_bytes: Callable[[int], None] | None = None) -> Path:
        """Have the complete file on disk and return its path (resumes a broken download).

        ``on_bytes`` is told the length of every piece as it arrives, and 0 now and then while waiting; it may
        raise to stop.
        """
        ...

    def adopt(self, name: str, path: Path) -> None:
        """Take note of another copy of the file, checked by the caller: with a hub source, it is read, rather than
        the network, when the cache does not hold the file. Nothing for local sources."""
        ...

    @property
    def download_dir(self) -> Path | None:
        """Existing folder on the disk that downloads go to; None when nothing is ever downloaded."""
        ...

    def drop_cache(self, name: str) -> None:
        """Let the operating system forget the cached pages of the file; a hint, never an error."""
        ...

    def consume(self, name: str) -> None:
        """Delete the downloaded copy of a file that is no longer needed; ``UsageError`` for local sources."""
        ...

    def close(self) -> None:
        """Release descriptors and connections; later reads are an error."""
        ...
