"""The digest of a file and of every tensor in it, from one read in order, two SHA-256 streams at a time."""

from __future__ import annotations

from collections.abc import Sequence

from ..checkpoint.tensor import TensorInfo
from ..errors import SourceError


class FileDigests:
    """Takes a file's bytes in order.

    Args:
        tensors: those in the file, in any order.
    """

    def __init__(self, tensors: Sequence[TensorInfo]) -> None:
        from quantkit_kernels.digest import sha256

        self._new = sha256
        self._tensors = sorted(tensors, key=lambda t: (t.offset, t.nbytes))
        self._next = 0
        self._file, self._tensor = sha256(), sha256()
        self._taken = 0
        self._done: dict[str, str] = {}

    def update(self, piece: memoryview) -> None:
        """The next bytes of the file."""
        from quantkit_kernels.digest import update_both

        start, end = self._taken, self._taken + len(piece)
        while self._next < len(self._tensors):
            tensor = self._tensors[self._next]
            first, last = max(tensor.offset, start), min(tensor.offset + tensor.nbytes, end)
            if first < last:
                self._file.update(piece[self._taken - start : max(first, self._taken) - start])
                self._taken = max(first, self._taken)
                here = piece[self._taken - start : max(last, self._taken) - start]
                update_both(self._tensor, piece[first - start : last - start], self._file, here)
                self._taken += len(here)
            if tensor.offset + tensor.nbytes > end:
                break
            self._done[tensor.name] = self._tensor.hexdigest()
            self._tensor = self._new()
            self._next += 1
        self._file.update(piece[self._taken - start :])
        self._taken = end

    def of_file(self) -> str:
        """sha256 of everything taken."""
        return self._file.hexdigest()

    def of_tensors(self) -> dict[str, str]:
        """sha256 by tensor name.

        Raises:
            SourceError: the file ended before a tensor did.
        """
        if self._next != len(self._tensors):
            tensor = self._tensors[self._next]
            raise SourceError("lies beyond the end of its file", where=f"{tensor.file}: {tensor.name}")
        return self._done
