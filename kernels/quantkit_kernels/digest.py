"""SHA-256 of two streams for the time of one, where the processor has instructions for it (csrc/sha256.cpp).

A conversion hashes every byte twice, for its file and for its tensor, and is bound by that: OpenSSL takes
1.8 GB/s on a core of the machine of docs/benchmarks.md, the two streams together 3.5 GB/s. Digests are
those of hashlib, which is used where the native library or the instructions are missing.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from ctypes import POINTER, byref, c_char, c_int, c_int64, c_uint8, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any, ClassVar, Protocol

import numpy as np

from .library import Library, NativeMissing
from .registry import ENV_BACKEND

Buffer = bytes | bytearray | memoryview


class Digest(Protocol):
    """What hashlib's objects and ours have in common."""

    def update(self, data: Buffer, /) -> None: ...

    def hexdigest(self) -> str: ...


class _State(ctypes.Structure):
    _fields_: ClassVar[Any] = [("state", c_uint32 * 8), ("count", c_uint64), ("rest", c_uint8 * 64)]


class _NativeSha256:
    """One stream; not for two threads at once. The GIL is free during an update."""

    def __init__(self, handle: ctypes.CDLL) -> None:
        self._handle, self.state = handle, _State()
        handle.qk_sha256_start(byref(self.state))

    def update(self, data: Buffer, /) -> None:
        self._handle.qk_sha256_update(byref(self.state), *_span(data), None, None, 0)

    def update_both(self, data: Buffer, other: _NativeSha256, other_data: Buffer) -> None:
        one, two = _span(data), _span(other_data)
        self._handle.qk_sha256_update(byref(self.state), *one, byref(other.state), *two)

    def hexdigest(self) -> str:
        out = (c_char * 32)()
        self._handle.qk_sha256_digest(byref(self.state), out)
        return out.raw.hex()


def sha256() -> Digest:
    """A new SHA-256 stream: native where that can run and QUANTKIT_KERNELS is not ``torch``, else hashlib's."""
    handle = None if os.environ.get(ENV_BACKEND) == "torch" else _native()
    return hashlib.sha256() if handle is None else _NativeSha256(handle)


def update_both(first: Digest, data: Buffer, second: Digest, other: Buffer) -> None:
    """``first.update(data)`` and ``second.update(other)``, at once if the streams are native.

    The gain is that of the shorter one's length. Buffers are contiguous bytes.

    Raises:
        ValueError: both are the same stream.
    """
    if first is second:
        raise ValueError("a stream cannot take two pieces at once")
    if isinstance(first, _NativeSha256) and isinstance(second, _NativeSha256):
        first.update_both(data, second, other)
        return
    first.update(data)
    second.update(other)


@cache
def _native() -> ctypes.CDLL | None:
    try:
        handle = Library.load().handle
        if not handle.qk_sha256_available():
            return None
    except (NativeMissing, ValueError, AttributeError):
        return None
    state = POINTER(_State)
    handle.qk_sha256_start.argtypes, handle.qk_sha256_start.restype = [state], None
    handle.qk_sha256_update.argtypes = [state, c_void_p, c_int64, state, c_void_p, c_int64]
    handle.qk_sha256_update.restype = None
    handle.qk_sha256_digest.argtypes, handle.qk_sha256_digest.restype = [state, c_void_p], None
    handle.qk_sha256_available.restype = c_int
    return handle


def _span(data: Buffer) -> tuple[int | None, int]:
    """Address and bytes; the caller holds ``data`` during the call."""
    if not memoryview(data).nbytes:
        return None, 0
    view = np.frombuffer(data, np.uint8)
    return int(view.ctypes.data), view.nbytes
