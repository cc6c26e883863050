"""The digest of a file that is still being written, as far as its beginning is final.

The file's digest needs its bytes in order, tensors come in any; waiting for the last one would leave a pass over
the whole file to one thread at the end. So who hashes a tensor that it writes hashes as much of the file beside
it (two SHA-256 streams take hardly longer than one), reading back what is final and not yet hashed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quantkit_kernels.digest import Digest

_PIECE = 512 << 10  # stays in a core's cache between reading and hashing


class PrefixDigest:
    """SHA-256 of a file from its first byte on.

    Args:
        fd: open for reading until the end.
        parts: name and end offset of every part in file order; a part begins where the one before ends.
    """

    def __init__(self, fd: int, parts: Sequence[tuple[str, int]]) -> None:
        from quantkit_kernels.digest import sha256

        self._fd, self._parts = fd, parts
        self._sha = sha256()
        self._position = 0
        self._final: set[str] = set()
        self._next = 0  # the first part that is not final
        self._limit = 0
        self._marks, self._turn = threading.Lock(), threading.Lock()
        self._buffer: memoryview | None = None  # a conversion has many files, few at a time

    def add(self, names: Iterable[str]) -> None:
        """These parts are written and will not change. Any thread."""
        with self._marks:
            self._final.update(names)
            while self._next < len(self._parts) and self._parts[self._next][0] in self._final:
                self._limit = self._parts[self._next][1]
                self._next += 1

    def update(self, digest: Digest, data: memoryview) -> None:
        """``digest.update(data)``, and as many bytes of the file if there are any and no other thread is at it."""
        from quantkit_kernels.digest import update_both

        if not self._turn.acquire(blocking=False):
            digest.update(data)
            return
        try:
            for start in range(0, len(data), _PIECE):
                piece = data[start : start + _PIECE]
                update_both(digest, piece, self._sha, self._read(min(len(piece), self._limit - self._position)))
        finally:
            self._turn.release()

    def finish(self, nbytes: int) -> str:
        """The digest of the whole file of ``nbytes`` bytes, all of which are final."""
        with self._turn:
            while self._position < nbytes:
                piece = self._read(min(_PIECE, nbytes - self._position))
                if not piece:
                    raise RuntimeError(f"the file ends at byte {self._position} of {nbytes}")
                self._sha.update(piece)
            self._buffer = None
            return self._sha.hexdigest()

    def _read(self, count: int) -> memoryview:
        if self._buffer is None:
            self._buffer = memoryview(bytearray(_PIECE))
        piece = self._buffer[:count]
        piece = piece[: os.preadv(self._fd, [piece], self._position) if count else 0]
        self._position += len(piece)
        return piece
