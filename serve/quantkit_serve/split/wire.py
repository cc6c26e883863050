"""What engine and worker say to each other over a socket: frames of a kind and so many bytes; arrays as they lie.

Nothing is pickled: the receiver knows what a frame of a kind holds, and both ends are the same version. Logits
don't travel here; a worker leaves them in shared memory.

Legend: R sequences of the step, T tokens of the step, P entries of a row of the block table, n rows of logits.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from ..batch import Batch
from ..phase import Phase

_FRAME = struct.Struct("<BQ")  # kind, bytes that follow
_DONE = struct.Struct("<Qd")  # rows of logits, seconds that the step took
_COUNTS = np.dtype("<i8")
_LIMIT = 1 << 32  # bytes of a frame; more is no frame
_PHASES = tuple(Phase)


class Kind(IntEnum):
    """HELLO (JSON: what to open) is answered with READY (JSON: what was opened); POOL (number of pages) with
    nothing; RUN (a batch) with DONE. Instead of READY or DONE comes FAILED (JSON: why), and the worker ends."""

    HELLO = 1
    READY = 2
    POOL = 3
    RUN = 4
    DONE = 5
    FAILED = 6


class Gone(ConnectionError):
    """The other side has closed its end, or has died."""


class TooLate(TimeoutError):
    """The other side is there, but does not answer in time."""


class Channel:
    """One end; frames are sent whole and received whole. For one thread at a time."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._end.setblocking(False)

    def send(self, kind: Kind, *parts: bytes | memoryview, limit_s: float | None = None) -> None:
        """
        Raises:
            Gone, TooLate: ``limit_s`` seconds have passed; None waits for ever.
        """
        whole = b"".join([_FRAME.pack(kind, sum(len(part) for part in parts)), *parts])
        rest, end = memoryview(whole), _end(limit_s)
        while rest:
            self._wait(select.POLLOUT, end)
            try:
                rest = rest[self._end.send(rest, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise Gone(str(error)) from error

    def receive(self, limit_s: float | None = None) -> tuple[Kind, bytearray]:
        """
        Raises:
            Gone, TooLate: as ``send``.
            ValueError: this is no frame.
        """
        end = _end(limit_s)
        kind, length = _FRAME.unpack(self._read(_FRAME.size, end))
        if length > _LIMIT:
            raise ValueError(f"a frame of {length} bytes")
        return Kind(kind), self._read(length, end)

    def close(self) -> None:
        self._end.close()

    def _read(self, count: int, end: float | None) -> bytearray:
        found = bytearray(count)
        rest = memoryview(found)
        while rest:
            self._wait(select.POLLIN, end)
            try:
                size = self._end.recv_into(rest)
            except BlockingIOError:
                continue
            except OSError as error:
                raise Gone(str(error)) from error
            if size == 0:
                raise Gone("the other side has closed its end")
            rest = rest[size:]
        return found

    def _wait(self, event: int, end: float | None) -> None:
        poll = select.poll()  # select itself knows no descriptors above 1023
        poll.register(self._end, event)
        left = None if end is None else max(end - time.monotonic(), 0) * 1000
        if not poll.poll(left):
            raise TooLate("no answer in time")


def _end(limit_s: float | None) -> float | None:
    return None if limit_s is None else time.monotonic() + limit_s


def pack_json(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode()


def unpack_json(payload: bytearray) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(payload)
    return found


def pack_done(rows: int, seconds: float) -> bytes:
    return _DONE.pack(rows, seconds)


def unpack_done(payload: bytearray) -> tuple[int, float]:
    """Rows of logits, seconds that the step took.

    Raises:
        ValueError: this is something else.
    """
    if len(payload) != _DONE.size:
        raise ValueError(f"an answer of {len(payload)} bytes")
    rows, seconds = _DONE.unpack(payload)
    return rows, seconds


def pack_batch(batch: Batch) -> Sequence[bytes]:
    """Five numbers (phase, R, T, P, n), then the arrays, those of 64 bits first."""
    rows, entries = batch.block_table.shape
    counts = [_PHASES.index(batch.phase), rows, len(batch.token_ids), entries, len(batch.logit_rows)]
    arrays = (
        batch.token_ids, batch.positions, batch.logit_rows, batch.cu_tokens, batch.lengths, batch.block_table,
    )  # fmt: skip
    return [np.array(counts, _COUNTS).tobytes(), *(array.tobytes() for array in arrays)]


def unpack_batch(payload: bytearray) -> Batch:
    """Its arrays are views of ``payload``.

    Raises:
        ValueError: the numbers don't add up to it.
    """
    phase, rows, tokens, entries, logits = np.frombuffer(payload, _COUNTS, 5).tolist()
    start, arrays = 5 * _COUNTS.itemsize, []
    for dtype, count in (
        ("<i8", tokens), ("<i8", tokens), ("<i8", logits),
        ("<i4", rows + 1), ("<i4", rows), ("<i4", rows * entries),
    ):  # fmt: skip
        arrays.append(np.frombuffer(payload, dtype, count, start))
        start += arrays[-1].nbytes
    if start != len(payload):
        raise ValueError(f"a batch of {start} bytes in a frame of {len(payload)}")
    token_ids, positions, logit_rows, cu_tokens, lengths, table = arrays
    return Batch(
        _PHASES[phase], token_ids, positions, cu_tokens, lengths, table.reshape(rows, entries), logit_rows
    )
