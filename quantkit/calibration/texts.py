"""The documents of a calibration text: bundled, a ``.txt`` or ``.jsonl`` file, a directory of them, a data set.

A ``.txt`` file is one document; the bundled text is a collection whose documents stand between empty lines. A line
of a ``.jsonl`` file is an object with either ``text`` or ``messages`` (a chat: objects with ``role`` and
``content``); empty lines and empty texts are passed over. A directory gives its files in the order of their names;
whatever else lies in it is an error rather than left out. What is not there is looked for on the Hub
(``hub_texts.py``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

from ..data import bundled_text
from ..errors import EnvironmentProblem, UsageError
from ..recipe.sections import BUNDLED_TEXT

SUFFIXES = (".txt", ".jsonl")
MAX_BYTES = 256 << 20  # 60 million tokens; a calibration set takes some 30,000
_OPTION = "--calibration"
_ACCEPTED = "bundled, a .txt or .jsonl file, a directory of them, or a data set of the Hub (org/name:split)"


@dataclass(frozen=True, slots=True)
class Document:
    """One text, or one chat: exactly one of both.

    Attributes:
        where: file and line, for errors.
    """

    where: str
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None


@dataclass(frozen=True, slots=True)
class Texts:
    """Documents in order, and sha256 of every file that they come from."""

    documents: tuple[Document, ...]
    sha256: tuple[str, ...]


def read_texts(data: str, tokens: int) -> Texts:
    """The documents of ``calibration.data``.

    Args:
        tokens: how many are wanted; decides how much of a data set is read, of anything else all is.

    Raises:
        UsageError: no such file, another kind of file, not UTF-8, a line that is not what it should be, no text.
        SourceError: a revision or access that the Hub refuses.
        EnvironmentProblem: a file cannot be read, the Hub not be reached.
    """
    if data != BUNDLED_TEXT and not Path(data).exists():
        return _from_hub(data, tokens)
    paths = _files(data)
    contents = [_read(path, MAX_BYTES) for path in paths]
    if sum(map(len, contents)) > MAX_BYTES:
        raise _too_large(data)
    documents: list[Document] = []
    for path, content in zip(paths, contents, strict=True):
        text = _decode(content, path)
        if data == BUNDLED_TEXT:
            documents += [Document(data, part) for part in text.split("\n\n")]
        elif path.suffix == ".jsonl":
            documents += _json_lines(text, path)
        elif text.strip():
            documents.append(Document(str(path), text))
        else:
            raise UsageError("the file holds no text", where=str(path))
    return Texts(tuple(documents), tuple(hashlib.sha256(content).hexdigest() for content in contents))


def _files(data: str) -> list[Path]:
    if data == BUNDLED_TEXT:
        return [bundled_text("calib")]
    path = Path(data)
    if path.is_dir():
        found = sorted(p for p in _entries(path) if not p.name.startswith("."))
        odd = next((p for p in found if p.suffix not in SUFFIXES or not p.is_file()), None)
        if odd is not None:
            is_broken = odd.is_symlink() and not odd.exists()
            kind = "is a link that leads nowhere" if is_broken else "is a directory" if odd.is_dir() else None
            raise UsageError(
                kind or "is neither a .txt nor a .jsonl file", where=str(odd), accepted=_ACCEPTED,
                hint="Move it elsewhere: nothing in a calibration directory is left out silently.",
            )  # fmt: skip
        if not found:
            raise UsageError("the directory holds no text", where=data, accepted=_ACCEPTED)
        return found
    if path.suffix not in SUFFIXES:
        raise UsageError(f"cannot calibrate with {data!r}", where=_OPTION, accepted=_ACCEPTED)
    return [path]


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError as error:
        raise EnvironmentProblem(f"cannot be read: {error.strerror}", where=str(directory)) from None


def _from_hub(data: str, tokens: int) -> Texts:
    from .hub_texts import parse_spec, read_dataset

    spec = parse_spec(data)
    if spec is None:
        raise UsageError(f"no such file or directory: {data!r}", where=_OPTION, accepted=_ACCEPTED)
    return read_dataset(spec, tokens)


def _read(path: Path, limit: int) -> bytes:
    try:
        if not S_ISREG(path.stat().st_mode):
            raise UsageError("is not a regular file", where=str(path), accepted=_ACCEPTED)
        with path.open("rb") as f:
            content = f.read(limit + 1)
    except OSError as error:
        raise EnvironmentProblem(f"cannot be read: {error.strerror}", where=str(path)) from None
    if len(content) > limit:
        raise _too_large(str(path))
    if not content:
        raise UsageError("the file is empty", where=str(path))
    return content


def _too_large(where: str) -> UsageError:
    return UsageError(f"more than {MAX_BYTES >> 20} MiB of text", where=where, hint="A part of it is enough.")


def _decode(content: bytes, path: Path) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"not UTF-8 text: byte 0x{content[error.start]:02x}", where=f"{path}:{line}", accepted="UTF-8"
        ) from None


def _json_lines(text: str, path: Path) -> Iterator[Document]:
    # Not splitlines: it would also break at characters that JSON allows inside a string.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            document = json_line(line, f"{path}:{number}")
            if document.text is None or document.text.strip():
                yield document


def json_line(line: str, where: str) -> Document:
    """A document from a line of JSON; UsageError if it is none."""
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not a line of JSON: {error}", where=where) from None
    return document_of(row, where)


def document_of(row: Any, where: str) -> Document:
    """A document from an object with either ``text`` or ``messages``; UsageError for anything else."""
    if not isinstance(row, dict) or ("text" in row) == ("messages" in row):
        seen = f"keys {', '.join(sorted(row)) or 'none'}" if isinstance(row, dict) else f"a {type(row).__name__}"
        accepted = "an object with either 'text' or 'messages', not both"
        raise UsageError(f"not a document: {seen}", where=where, accepted=accepted)
    if "text" in row:
        return Document(where, _text(row["text"], where))
    messages = row["messages"]
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in messages)
    ):
        raise UsageError(
            "'messages' is not a chat", where=where, accepted="a list of objects with 'role' and 'content'"
        )
    return Document(where, messages=tuple(messages))


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"'text' is a {type(value).__name__}", where=where, accepted="text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UsageError("'text' holds half a character (a lone surrogate)", where=where) from None
    return value
