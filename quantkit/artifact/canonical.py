"""One spelling for JSON and one digest for a set of tensors, so that equal content has equal bytes.

Canonical JSON here: UTF-8, keys sorted by code point, no insignificant spaces, no NaN or Infinity, floats as
Python's shortest round-trip form. It is a subset of RFC 8785 except for the spelling of exponents, which no core
file needs: error figures are rounded to six significant digits before they get here.

The tensor root is a flat digest and not a tree: a verifier reads every line anyway.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

READ_BYTES = 8 << 20
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def canonical_json(value: Any) -> bytes:
    """The one byte string for a JSON value; raises ValueError for NaN, Infinity or what JSON can't hold."""
    return _ENCODER.encode(value).encode("utf-8", "surrogatepass")


def readable_json(value: Any, *, constants: bool = False) -> bytes:
    """Deterministic JSON for people: sorted keys, two spaces, final newline.

    Args:
        constants: write NaN and Infinity as Python does, for a config.json whose publisher has them.
    """
    text = json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=constants)
    return text.encode("utf-8", "surrogatepass") + b"\n"


def parse_json(data: bytes) -> Any:
    """Any JSON document of an artifact; a ValueError when it can't be read, also when it is nested too deeply."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def utc_now() -> str:
    """The time as in-toto wants it: RFC 3339, UTC, written ``Z``."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def digest_json(value: Any) -> str:
    """sha256 over the canonical JSON of a value."""
    return sha256_hex(canonical_json(value))


def tensor_line(name: str, dtype: str, shape: tuple[int, ...], sha256: str) -> bytes:
    """The line of one tensor in a tensor root. A JSON array: names are opaque and may hold any character."""
    return canonical_json([name, dtype, list(shape), sha256]) + b"\n"


def tensor_root(tensors: Iterable[tuple[str, str, tuple[int, ...], str]]) -> str:
    """sha256 over the sorted lines ``[name,dtype,shape,sha256]`` of a set of tensors.

    Independent of the files the tensors lie in and of their order there.
    """
    digest = hashlib.sha256()
    for line in sorted(tensor_line(*tensor) for tensor in tensors):
        digest.update(line)
    return digest.hexdigest()


def round_figure(value: float) -> float:
    """An error figure as the core stores it: six significant digits, far above summation noise."""
    return float(f"{value:.6g}")


def hash_file(path: Path, *, drop_cache: bool = False) -> tuple[str, int]:
    """sha256 and size of a file in one in-order pass over large buffers; optionally leaves no page cache."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(READ_BYTES))
    fd = os.open(path, os.O_RDONLY)
    try:
        total = 0
        while count := os.preadv(fd, [buffer], total):
            digest.update(buffer[:count])
            total += count
        if drop_cache:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    return digest.hexdigest(), total
