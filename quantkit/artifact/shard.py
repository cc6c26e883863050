"""Writes one safetensors file whose tensors are known beforehand: header first, then bytes at their offsets.

Why not ``safetensors.save_file``: it wants all tensors in memory, is not deterministic with more than one metadata
key and leaves mode 0600. Here offsets are fixed before the first byte, so that many threads write different
tensors at once (pwrite), every tensor is hashed as it is written, and a file interrupted half-way can be
continued.

A shard lives under ``NAME.unfinished`` until ``finish``: hash of the whole file, read in order (``prefix.py``),
fdatasync, rename, directory fsync, in this order; a file under its final name is therefore complete.

Left out: the journal that says which tensors of an unfinished shard are already there (``journal.py``).
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..safetensors_header import render_header
from ..scheme import OutputTensor
from .canonical import READ_BYTES
from .durable import disk_errors, fsync_dir
from .layout import UNFINISHED_SUFFIX
from .prefix import PrefixDigest

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class FileDigest:
    """A finished file: size in bytes and sha256 of all of it."""

    nbytes: int
    sha256: str


class TensorSink:
    """Takes the bytes of one tensor in order; one thread at a time.

    ``digest()`` is the sha256 of what was written and raises if bytes are missing: that is a bug in the caller,
    since the shapes were planned.
    """

    def __init__(self, fd: int, path: Path, tensor: OutputTensor, offset: int, prefix: PrefixDigest) -> None:
        from quantkit_kernels.digest import sha256

        self._fd, self._path, self._tensor, self._offset, self._prefix = fd, path, tensor, offset, prefix
        self._written = 0
        self._sha = sha256()

    def write(self, data: Buffer) -> None:
        view = memoryview(data)
        if view.format != "B" or view.ndim != 1:
            view = view.cast("B")
        if self._written + len(view) > self._tensor.nbytes:
            raise RuntimeError(f"{self._tensor.name}: more bytes than its shape has")
        with disk_errors(self._path):
            pwrite_all(self._fd, view, self._offset + self._written)
        self._prefix.update(self._sha, view)
        self._written += len(view)

    def digest(self) -> str:
        if self._written != self._tensor.nbytes:
            raise RuntimeError(f"{self._tensor.name}: {self._written} of {self._tensor.nbytes} bytes written")
        return self._sha.hexdigest()


class ShardWriter:
    """A shard being written; see the module docstring for its life.

    Args:
        path: final path; its directory exists.
        tensors: all tensors in file order.

    A file left by an earlier run is continued when its header is the same, else started anew; ``resumed`` tells.

    Raises:
        EnvironmentProblem: the disk is full or not writable.
    """

    def __init__(self, path: Path, tensors: Sequence[OutputTensor]) -> None:
        self.path = path
        self.unfinished = path.with_name(path.name + UNFINISHED_SUFFIX)
        self._header = render_header(tensors)
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._offsets = tensor_offsets(tensors)
        self.nbytes = len(self._header) + sum(tensor.nbytes for tensor in tensors)
        with disk_errors(path):
            self._fd = os.open(self.unfinished, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self.resumed = self._has_same_header()
            if not self.resumed:
                self._start()
            ends = ((tensor.name, self._offsets[tensor.name] + tensor.nbytes) for tensor in tensors)
            self._prefix = PrefixDigest(self._fd, (("", len(self._header)), *ends))
            self._prefix.add(("",))  # the header
        except BaseException:
            self.close()
            raise

    def _has_same_header(self) -> bool:
        return (
            os.fstat(self._fd).st_size == self.nbytes and os.pread(self._fd, len(self._header), 0) == self._header
        )

    def _start(self) -> None:
        with disk_errors(self.path):
            os.ftruncate(self._fd, 0)
            reserve(self._fd, self.nbytes)
            pwrite_all(self._fd, memoryview(self._header), 0)

    def sink(self, name: str) -> TensorSink:
        """Where to write the bytes of one tensor."""
        return TensorSink(self._fd, self.path, self._tensors[name], self._offsets[name], self._prefix)

    def preset(self, known: Mapping[str, bytes]) -> None:
        """Write tensors whose bytes are known before their jobs run; those write the same once more.

        Small tensors may stand before large ones: the file's digest needs them first.
        """
        with disk_errors(self.path):
            for name, data in known.items():
                if len(data) != self._tensors[name].nbytes:
                    raise RuntimeError(f"{name}: {len(data)} bytes, its shape has {self._tensors[name].nbytes}")
                pwrite_all(self._fd, memoryview(data), self._offsets[name])
        self.settle(known)

    def settle(self, names: Iterable[str]) -> None:
        """These tensors are written and stay as they are, so that the file's digest may count them in."""
        self._prefix.add(names)

    def rehash(self, name: str) -> str:
        """sha256 of what the file holds for a tensor now (after an interruption)."""
        digest, position = hashlib.sha256(), self._offsets[name]
        end = position + self._tensors[name].nbytes
        while position < end:
            data = os.pread(self._fd, min(READ_BYTES, end - position), position)
            if not data:
                break
            digest.update(data)
            position += len(data)
        return digest.hexdigest()

    def hurry(self) -> None:
        """Let the disk begin with what is written so far."""
        start_writeback(self._fd)

    def sync(self) -> None:
        """Make everything written so far durable (data before journal)."""
        with disk_errors(self.path):
            os.fdatasync(self._fd)

    def finish(self) -> FileDigest:
        """Complete the file under its final name; all tensors were written.

        What the digest lacks is read back while the kernel is already writing it out, before the sync.
        """
        sha256 = self._prefix.finish(self.nbytes)
        with disk_errors(self.path):
            os.fdatasync(self._fd)
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
            self.unfinished.replace(self.path)
            fsync_dir(self.path.parent)
        self.close()
        return FileDigest(self.nbytes, sha256)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def tensor_offsets(tensors: Sequence[OutputTensor]) -> dict[str, int]:
    """Where the bytes of each tensor begin in a file of these tensors."""
    offsets: dict[str, int] = {}
    position = len(render_header(tensors))
    for tensor in tensors:
        offsets[tensor.name] = position
        position += tensor.nbytes
    return offsets


def pwrite_all(fd: int, view: memoryview, offset: int) -> None:
    """pwrite until everything is written; a short write is legal and happens on a full disk."""
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def start_writeback(fd: int, offset: int = 0, nbytes: int = 0) -> None:
    """Ask the kernel to begin writing dirty pages out (``nbytes`` 0: to the end), so that the sync later is short.

    A hint: nothing is durable by it, and file systems that can't are left alone.
    """
    if _libc is not None:
        _libc.sync_file_range(fd, offset, nbytes, _SYNC_FILE_RANGE_WRITE)


def reserve(fd: int, nbytes: int) -> None:
    """Set the size of a file and reserve its blocks where the file system can.

    The raw system call, not ``os.posix_fallocate``: glibc emulates the latter by writing into every block where
    the file system has no such operation, which doubles the writing.
    """
    os.ftruncate(fd, nbytes)
    if nbytes and _libc is not None and _libc.fallocate(fd, 0, 0, nbytes) != 0:
        code = ctypes.get_errno()
        if code in _REFUSALS:
            raise OSError(code, os.strerror(code))


def _load_libc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    except (OSError, AttributeError):
        return None
    return libc


_libc = _load_libc()
_SYNC_FILE_RANGE_WRITE = 2
_REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the space is not there; other codes mean "can't tell"
