"""A checkpoint: index and headers, nothing of the data until bytes are asked for.

One class for every source; where the bytes come from is the file store's matter. Reads are ``pread`` of exactly
the range asked for and may run in many threads at once. numpy only: importing torch costs 285 MiB and a second.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ..errors import SourceError, UsageError
from .config import read_config
from .header import FileInfo, read_header
from .index import check_claims, find_weight_files
from .scales import scales_float32
from .sidefiles import side_files
from .store import FileStore
from .tensor import StoredWeight, TensorInfo
from .weights import find_weights, no_such_weight

_NUMPY: dict[str, str] = {
    "BOOL": "u1", "U8": "u1", "I8": "i1", "F8_E5M2": "u1", "F8_E4M3": "u1", "F8_E8M0": "u1",
    "I16": "<i2", "U16": "<u2", "F16": "<f2", "BF16": "<u2", "I32": "<i4", "U32": "<u4", "F32": "<f4",
    "I64": "<i8", "U64": "<u8", "F64": "<f8", "C64": "<c8",
}  # fmt: skip


class Checkpoint:
    """Tensors, weights and side files of one source. A context manager; reads are thread-safe.

    Attributes:
        label: what the user calls it. kind: ``local``, ``hub`` or ``bundled``. revision: commit of a hub source.
        config: content of config.json, ``{}`` when there is none.
        tensors: name to TensorInfo, ordered by (file, offset).
        files: name to FileInfo of the safetensors files.
        side_files: everything else worth copying, sorted by name.
        warnings: what the user should know about this source.
        fingerprint: sha256 over file names, sizes, header digests, etags and config.json; no data are read for it,
            so a change of weight bytes alone does not show in it unless the hub's etag tells.

    Raises:
        SourceError, UnsupportedError: see ``header``, ``index`` and ``config``.
    """

    def __init__(self, store: FileStore) -> None:
        self._store = store
        self.label, self.kind, self.revision = store.label, store.kind, store.revision
        found = find_weight_files(store)
        self.config, config_bytes, config_warnings = read_config(store)
        self.files, self.tensors = _read_headers(store, found.files)
        check_claims(found, self.tensors)
        self.side_files, side_warnings = side_files(store)
        self.warnings: tuple[str, ...] = (*store.warnings, *found.warnings, *config_warnings, *side_warnings)
        self.fingerprint = _fingerprint(self.files, config_bytes)
        self._weights: Mapping[str, StoredWeight] | None = None
        self._weights_lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Checkpoint {self.label}: {len(self.tensors):,} tensors in {len(self.files):,} files>"

    def close(self) -> None:
        """Release descriptors and connections; reading afterwards is a UsageError."""
        self._store.close()

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    # bytes

    def read(self, tensor: TensorInfo | str) -> npt.NDArray[np.uint8]:
        """All bytes of a tensor, uint8 of shape (nbytes,)."""
        info = self._info(tensor)
        data = np.empty(info.nbytes, np.uint8)
        self.read_into(info, 0, data.data)
        return data

    def read_range(self, tensor: TensorInfo | str, start: int, stop: int) -> memoryview:
        """Bytes ``start`` to ``stop`` of a tensor's data."""
        data = bytearray(self._span(self._info(tensor), start, stop - start))
        self.read_into(tensor, start, memoryview(data))
        return memoryview(data)

    def read_into(self, tensor: TensorInfo | str, start: int, buffer: memoryview) -> None:
        """Fill a writable buffer from byte ``start`` of a tensor's data."""
        info = self._info(tensor)
        if self._span(info, start, buffer.nbytes):
            self._store.readinto(info.file, info.offset + start, buffer)

    def array(self, tensor: TensorInfo | str) -> npt.NDArray[Any]:
        """A tensor in raw storage dtype and its shape: F8 as uint8, BF16 as uint16; sub-byte dtypes flat uint8."""
        info = self._info(tensor)
        data = self.read(info)
        return data.view(_NUMPY[info.dtype]).reshape(info.shape) if info.dtype in _NUMPY else data

    def side_bytes(self, name: str) -> bytes:
        """Content of a side file, config.json or the index."""
        size = self._store.names().get(name)
        if size is None:
            raise SourceError(f"has no file {name!r}", where=self.label)
        return self._store.read_at(name, 0, size)

    # weights

    def weights(self) -> Mapping[str, StoredWeight]:
        """Module name to stored weight for every two-dimensional weight, in the order of ``tensors``.

        Raises:
            SourceError: a scale is missing, doubled or of the wrong shape.
            UnsupportedError: a weight is stored in a format that quantkit does not read.
        """
        with self._weights_lock:
            if self._weights is None:
                self._weights = MappingProxyType(find_weights(self.tensors, self.config))
            return self._weights

    def weight(self, module: str) -> StoredWeight:
        """One entry of ``weights()``; a module that is no two-dimensional weight gets an error that says why."""
        found = self.weights().get(module)
        if found is None:
            raise no_such_weight(module, self.tensors)
        return found

    def scales_float32(self, weight: StoredWeight) -> npt.NDArray[np.float32]:
        """Scales of a weight as float32 [block rows, block columns].

        That is the block grid, [O, 1] per channel, [1, 1] per tensor, [O, G] for INT4.

        Raises:
            SourceError: a scale is NaN, infinite or negative, or zero where the codes are not.
        """
        return scales_float32(self, weight)

    # files

    def local_path(self, file: str) -> Path | None:
        """Path of a file that is completely on disk, links resolved (so that it can be hard-linked), else None."""
        path = self._store.local_path(file)
        return None if path is None else path.resolve()

    def fetch(self, file: str, on_bytes: Callable[[int], None] | None = None) -> Path:
        """Path of a file, links resolved, downloaded first where needed.

        ``on_bytes`` is told the bytes as they arrive, and 0 now and then while waiting; it may raise to stop.
        """
        return self._store.fetch(file, on_bytes).resolve()

    def adopt(self, file: str, path: Path) -> None:
        """Name a checked copy of a hub file, to be read instead of the network once the cache lacks the file."""
        self._store.adopt(file, path)

    @property
    def download_dir(self) -> Path | None:
        """Existing folder on the disk that downloads go to; None for local sources."""
        return self._store.download_dir

    def release(self, file: str) -> None:
        """Drop the file's pages from the page cache."""
        self._store.drop_cache(file)

    def consume(self, file: str) -> None:
        """Delete the downloaded copy of a file; UsageError for sources that are not on a hub."""
        self._store.consume(file)

    def _info(self, tensor: TensorInfo | str) -> TensorInfo:
        if isinstance(tensor, TensorInfo):
            return tensor
        info = self.tensors.get(tensor)
        if info is None:
            from difflib import get_close_matches

            alike = [
                name for name in self.tensors if abs(len(name) - len(tensor)) < 4 and name[-1:] == tensor[-1:]
            ]
            near = get_close_matches(tensor, alike[:2000], n=1)  # all of 100,000 names would take seconds
            raise UsageError(
                f"no tensor {tensor!r}", where=self.label, hint=f"Did you mean {near[0]!r}?" if near else None
            )
        return info

    def _span(self, info: TensorInfo, start: int, length: int) -> int:
        if start < 0 or length < 0 or start + length > info.nbytes:
            raise ValueError(
                f"bytes {start} to {start + length} are outside of {info.name!r} ({info.nbytes} bytes)"
            )
        return length


def _read_headers(
    store: FileStore, names: tuple[str, ...]
) -> tuple[Mapping[str, FileInfo], Mapping[str, TensorInfo]]:
    """All headers; the result does not depend on the order in which they arrive."""
    files: dict[str, FileInfo] = {}
    tensors: dict[str, TensorInfo] = {}
    with ThreadPoolExecutor(max(1, store.parallel_reads)) as pool:
        try:
            for info, content in pool.map(lambda name: read_header(store, name), names):
                files[info.name] = info
                for tensor in content:
                    _add(tensors, tensor)
        except BaseException:
            store.close()  # whoever waits for a server (minutes, if it says so) stops, and Ctrl-C takes effect
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return MappingProxyType(files), MappingProxyType(tensors)


def _add(tensors: dict[str, TensorInfo], tensor: TensorInfo) -> None:
    other = tensors.setdefault(tensor.name, tensor)
    if other is not tensor:
        raise SourceError(
            f"tensor {tensor.name!r} stands in {other.file} as well",
            where=tensor.file,
            hint="Remove the file that does not belong to the checkpoint; quantkit does not choose.",
        )


def _fingerprint(files: Mapping[str, FileInfo], config: bytes) -> str:
    rows = [[f.name, f.nbytes, f.header_sha256, f.etag] for f in sorted(files.values(), key=lambda f: f.name)]
    content = json.dumps(rows, separators=(",", ":")).encode() + b"\n" + config
    return hashlib.sha256(content).hexdigest()
