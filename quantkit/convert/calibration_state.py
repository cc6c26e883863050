"""Large arrays of a calibration on disk: working arrays over the memory budget, and the state between two layers.

The state after a layer is what the next one starts from: hidden states, and for DSA layers the top-k that is
carried along. It is written to one of two files in turn, synced, and then journalled with its digest, so that a
crash at any moment leaves the state of the last journalled layer whole. Nothing here reaches the artifact.
"""

from __future__ import annotations

import hashlib
import os
from mmap import MADV_DONTNEED, mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..artifact.durable import disk_errors, fsync_dir
from ..artifact.journal import Entry
from ..artifact.shard import reserve
from ..calibration.arrays import InMemory
from ..calibration.stream import Stream

if TYPE_CHECKING:
    from torch import Tensor

FOLDER = "calibration"
_PIECE = 16 << 20


class SpilledArrays:
    """Arrays of a stream: in memory while they fit, then in files that are mapped (``stream.Arrays``).

    Args:
        folder: for the files; exists.
        limit: bytes in memory.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._left = folder, limit
        self._memory = InMemory()
        self._mapped: list[mmap] = []

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> Tensor:
        import numpy as np
        import torch

        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if nbytes <= self._left:
            self._left -= nbytes
            return self._memory(shape, dtype)
        path = self._folder / f"array-{len(self._mapped)}"
        with disk_errors(path), open(path, "w+b") as handle:
            reserve(handle.fileno(), nbytes)  # blocks now, or a full disk would end the process later
            array: Any = np.memmap(handle, dtype, "r+", shape=shape)
            path.unlink()  # the mapping keeps it; nothing is left behind whatever happens
            self._mapped.append(array._mmap)
            return torch.from_numpy(array)

    def trim(self) -> None:
        """Take mapped pages out of this process's memory; what was written stays in the files."""
        for mapped in self._mapped:
            mapped.madvise(MADV_DONTNEED)


def save_state(stream: Stream, folder: Path) -> Entry:
    """Write the inputs of layer ``stream.position``; returns the journal's line about it."""
    layer = stream.position - 1
    path = folder / f"state-{layer % 2}"
    digest = hashlib.sha256()
    with disk_errors(path), open(path, "wb") as handle:
        for view in _views(stream):
            for start in range(0, len(view), _PIECE):
                piece = view[start : start + _PIECE]
                digest.update(piece)
                handle.write(piece)
                stream.trim()
        handle.flush()
        os.fsync(handle.fileno())
    fsync_dir(folder)
    carried = None if stream.carried is None else list(stream.carried.shape)
    return {
        "kind": "calibration", "layer": layer, "file": path.name, "sha256": digest.hexdigest(), "carried": carried,
    }  # fmt: skip


def load_state(stream: Stream, folder: Path, entry: Entry) -> bool:
    """Continue from a journalled state; False, with nothing of use in the stream, when the file is not it."""
    path = folder / entry["file"]
    stream.stand_at(entry["layer"] + 1)
    if entry["carried"] is not None:
        stream.start_carrying(tuple(entry["carried"]))
    digest = hashlib.sha256()
    if not path.is_file() or path.stat().st_size != sum(len(view) for view in _views(stream)):
        return False
    with disk_errors(path), open(path, "rb") as handle:
        for view in _views(stream):
            for start in range(0, len(view), _PIECE):
                piece = view[start : start + _PIECE]
                handle.readinto(piece)
                digest.update(piece)
                stream.trim()
    return digest.hexdigest() == str(entry["sha256"])


def _views(stream: Stream) -> list[memoryview]:
    arrays = [stream.hidden] + ([] if stream.carried is None else [stream.carried])
    return [memoryview(array.numpy().reshape(-1)).cast("B") for array in arrays]  # type: ignore[arg-type]
