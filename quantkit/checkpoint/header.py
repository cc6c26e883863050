"""Strict parser of safetensors headers.

A header decides which bytes become which weight, so whatever is ambiguous is refused here, once, with the file and
the tensor named. The reference implementation is the lower bound; beyond it this parser refuses duplicate JSON
keys (the reference lets the last one win, other readers the first) and unknown keys in a tensor's entry.

Only ranges are read, never the data, and one request suffices for most shards. Names are opaque: ``../x`` is a
legal tensor name and is never used as a path.

Source: safetensors 0.8, ``safetensors/src/tensor.rs`` (``read_metadata``, ``Metadata::validate``).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from math import prod
from sys import intern
from typing import Any, NoReturn

from ..dtypes import BITS
from ..errors import SourceError
from .store import FileStore
from .tensor import TensorInfo

MAX_HEADER_BYTES = 100_000_000  # as in the reference
_FIRST_READ = 128 * 1024  # holds the header of a shard of a thousand tensors, so that a hub needs one request
_MAX_DIMENSIONS = 64  # numpy's limit
_AGAIN = "Download or copy the file again."
_KEYS = {"dtype", "shape", "data_offsets"}


class DuplicateKeyError(ValueError):
    """A JSON object names the same key twice."""


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One safetensors file.

    Attributes:
        name: file name inside the checkpoint.
        nbytes: size of the whole file in bytes.
        header_sha256: digest of the length field and the header as they stand in the file.
        etag: content identity stated by a hub, None for local files.
        data_start: byte offset of the data.
        metadata: the header's ``__metadata__``.
    """

    name: str
    nbytes: int
    header_sha256: str
    etag: str | None
    data_start: int
    metadata: tuple[tuple[str, str], ...] = ()


def read_header(store: FileStore, name: str) -> tuple[FileInfo, list[TensorInfo]]:
    """Header of one file; tensors come in the order of their offsets.

    Raises:
        SourceError: the file is not a complete, unambiguous safetensors file.
    """
    size = store.names()[name]
    raw = _raw_header(store, name, size)
    start = len(raw)
    entries = _parse(raw, name)
    metadata = _metadata(entries.pop("__metadata__", None), name)
    file = intern(name)
    tensors = [_tensor(file, key, entry, start) for key, entry in entries.items()]
    tensors.sort(key=lambda t: (t.offset, t.nbytes))
    _check_layout(tensors, name, start, size)
    digest = hashlib.sha256(raw).hexdigest()
    return FileInfo(file, size, digest, store.etag(name), start, metadata), tensors


def parse_json_object(text: str, *, constants: bool = False) -> dict[str, Any]:
    """A JSON object without duplicate keys at any level.

    Args:
        text: the document.
        constants: take NaN and Infinity, as Python writes them (some publishers' config.json has them).

    Raises:
        DuplicateKeyError: a key stands twice in one object.
        ValueError: not JSON, or not an object.
    """
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=float if constants else _no_constant,
            parse_int=_integer if "-0" in text else None,
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}, not an object")
    return value


def _raw_header(store: FileStore, name: str, size: int) -> bytes:
    if size < 8:
        _fail(name, f"{size} bytes are too few for a safetensors file", hint=_AGAIN)
    first = store.read_at(name, 0, min(size, _FIRST_READ))
    if first.startswith(b"version https://git-lfs"):
        _fail(
            name,
            "is a Git LFS pointer, not the weights themselves",
            hint="Run `git lfs pull` in the checkpoint, or download it with `hf download`.",
        )
    length = int.from_bytes(first[:8], "little")
    if length > MAX_HEADER_BYTES:
        _fail(
            name,
            f"header length {length:,} is over the format's limit of {MAX_HEADER_BYTES:,} bytes",
            hint="This is not a safetensors file, or its beginning is damaged.",
        )
    if 8 + length > size:
        _fail(name, f"header needs {8 + length:,} bytes but the file has {size:,}: it is truncated", hint=_AGAIN)
    raw = first[: 8 + length]
    return raw + store.read_at(name, len(raw), 8 + length - len(raw)) if len(raw) < 8 + length else raw


def _parse(raw: bytes, name: str) -> dict[str, Any]:
    if raw[8:9] != b"{":
        _fail(name, "header does not begin with '{'", hint="This is not a safetensors file, or it is damaged.")
    try:
        entries = parse_json_object(raw[8:].decode("utf-8"))
        if b"\\u" in raw:
            "".join(entries).encode("utf-8")  # a lone surrogate can be written as \ud800 but is no text
    except UnicodeError as error:
        _fail(name, f"header is not valid UTF-8 ({error})", hint=_AGAIN)
    except DuplicateKeyError as error:
        _fail(
            name,
            f"header {error}",
            hint="Readers disagree on which entry counts; the file must be written again.",
        )
    except ValueError as error:
        _fail(name, f"header is not valid JSON: {error}", hint=_AGAIN)
    return entries


def _metadata(value: object, name: str) -> tuple[tuple[str, str], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        _fail(name, "__metadata__ must be an object of strings")
    return tuple(sorted(value.items()))


def _tensor(file: str, key: str, entry: object, start: int) -> TensorInfo:
    """Check one entry by itself."""
    if not isinstance(entry, dict) or entry.keys() != _KEYS:
        seen = ", ".join(map(repr, entry)) if isinstance(entry, dict) else type(entry).__name__
        _fail(file, f"entry has {seen or 'no keys'}", tensor=key, accepted="exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        _fail(file, f"unknown dtype {dtype!r}", tensor=key, accepted=", ".join(BITS))
    if not _naturals(shape) or len(shape) > _MAX_DIMENSIONS:
        _fail(
            file,
            f"shape {_brief(shape)} is not a shape",
            tensor=key,
            accepted=f"at most {_MAX_DIMENSIONS} integers, 0 or more and below 2**63",
        )
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _fail(file, f"data_offsets {_brief(offsets)} are no range", tensor=key, accepted="[begin, end]")
    begin, end = offsets
    bits = BITS[dtype] * prod(shape)
    if bits != 8 * (end - begin):
        need = f"{bits // 8:,}" if bits % 8 == 0 else f"{bits / 8} (not whole bytes)"
        _fail(
            file,
            f"{dtype} of shape {_brief(shape)} needs {need} bytes, its offsets hold {end - begin:,}",
            tensor=key,
        )
    return TensorInfo(key, intern(dtype), _shape(tuple(shape)), file, start + begin, end - begin)


_SHAPES: dict[tuple[int, ...], tuple[int, ...]] = {}


def _shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The same tuple object for equal shapes: a checkpoint has 100,000 tensors of a dozen shapes."""
    if len(_SHAPES) > 4096:
        _SHAPES.clear()
    return _SHAPES.setdefault(shape, shape)


def _check_layout(tensors: list[TensorInfo], name: str, start: int, size: int) -> None:
    """Data must be contiguous from the header to the end of the file."""
    position, previous = start, "the header"
    for tensor in tensors:
        if tensor.offset < position:
            _fail(name, f"its data overlap those of {previous!r}", tensor=tensor.name, hint=_AGAIN)
        if tensor.offset > position:
            gap = tensor.offset - position
            _fail(name, f"a hole of {gap:,} bytes stands before its data", tensor=tensor.name, hint=_AGAIN)
        position, previous = tensor.offset + tensor.nbytes, tensor.name
        if position > size:
            _fail(
                name,
                f"file is truncated: the data end at byte {position:,}, the file at {size:,}",
                tensor=tensor.name,
                hint=_AGAIN,
            )
    if position < size:
        _fail(name, f"{size - position:,} bytes after the last tensor belong to no tensor", hint=_AGAIN)


def _naturals(value: object) -> bool:
    """A list of integers in [0, 2**63); bool is not an integer here."""
    return isinstance(value, list) and all(type(x) is int and 0 <= x < 2**63 for x in value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise DuplicateKeyError(f"names the key {key!r} twice")
            seen.add(key)
    return result


def _integer(text: str) -> int | float:
    """-0 is a float in JSON readers that tell integers apart, the reference among them."""
    return -0.0 if text == "-0" else int(text)


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _fail(
    file: str, what: str, *, tensor: str | None = None, accepted: str | None = None, hint: str | None = None
) -> NoReturn:
    where = file if tensor is None else f"{file}, tensor {tensor!r}"
    raise SourceError(what, where=where, accepted=accepted, hint=hint)
