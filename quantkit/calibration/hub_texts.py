"""Calibration text from a data set of the Hub: ``org/name[@revision][/path][:split]``.

Which files: those below ``path`` of a kind that is read (parquet, JSON lines, text, the last two also gzipped), by
the Hub's naming of splits. ``<split>-00000-of-00005.*`` names its split exactly; any other file belongs to a split
whose name stands as a word of its own in its path; files of which none names a split are all taken. Without
``:split`` it is ``train``. All must lie in one folder, else ``path`` has to choose (subsets such as wikitext's).

How much: files in the order of their names, rows in the order of the file, until their text has
``BYTES_PER_TOKEN`` bytes for each token that is wanted. So the set is the same for everybody at the same commit,
and of a data set of a million chats a few hundred are looked at; which of these are taken is the seed's choice, as
with any text. The digests are those of the whole files. A branch may move on between a conversion and its
resumption, which is then refused as another calibration set; ``@commit`` stays.

Left out: the ``configs`` that a README may declare, JSON that is one array, columns of other names than ``text``
and ``messages``: `datasets` writes all of them as jsonl in one line.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..checkpoint.hub_dataset import HubDataset
from ..checkpoint.hub_settings import is_hub_id
from ..errors import EnvironmentProblem, SourceError, UsageError
from .texts import MAX_BYTES, Document, Texts, document_of, json_line

BYTES_PER_TOKEN = 32  # English has four to five: eight times what is wanted, for the seed to choose from
DEFAULT_SPLIT = "train"
_SUFFIXES = (".parquet", ".jsonl", ".json", ".txt", ".jsonl.gz", ".json.gz", ".txt.gz")
_NOT_DATA = ("dataset_info.json", "dataset_infos.json", "license.txt", "readme.txt", "requirements.txt")
_SPEC = re.compile(
    r"(?P<repo>[^/@:]+/[^/@:]+)(?:@(?P<revision>refs/(?:convert|pr)/[^/:]+|[^/:]+))?(?:/(?P<path>[^:]+))?"
    r"(?::(?P<split>[^:/]+))?"
)
_SHARD = re.compile(r"(?P<split>\w+(?:\.\w+)*)-\d{5}-of-\d{5}(?:\.|-)")
_SPLIT_WORDS = ("train", "training", "valid", "validation", "val", "dev", "test", "testing", "eval", "evaluation")


class _Bytes(Protocol):
    """What an open file and an open gzip file have in common."""

    def read(self, size: int, /) -> bytes: ...

    def readline(self, size: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    """A parsed ``org/name[@revision][/path][:split]``; ``path`` without slashes at its ends, empty for all."""

    source: str
    path: str
    split: str | None


def parse_spec(data: str) -> DatasetSpec | None:
    """None: not the name of a data set."""
    match = _SPEC.fullmatch(data.removeprefix("hf://").removeprefix("datasets/"))
    if match is None or not is_hub_id(match["repo"]):
        return None
    if not match["path"] and match["repo"].endswith(_SUFFIXES):
        return None  # a file that is not there
    source = match["repo"] + (f"@{match['revision']}" if match["revision"] else "")
    return DatasetSpec(source, (match["path"] or "").strip("/"), match["split"])


def read_dataset(spec: DatasetSpec, tokens: int) -> Texts:
    """Documents of a data set, enough for ``tokens`` tokens, and sha256 of the files that they come from.

    Raises:
        UsageError: no such data set or split, no file of a kind that is read, rows without text or messages.
        SourceError: no such revision, or no access.
        EnvironmentProblem: network, disk, or no pyarrow to read parquet with.
    """
    dataset = _open(spec)
    documents: list[Document] = []
    digests: list[str] = []
    left = BYTES_PER_TOKEN * tokens
    for name in choose_files(dataset.names, spec, dataset.label):
        path = dataset.fetch(name)
        digests.append(_digest(path))
        for document in _documents(path, f"{dataset.label}/{name}", left):
            documents.append(document)
            left -= _size(document)
            if left <= 0:
                return Texts(tuple(documents), tuple(digests))
    if not documents:
        raise UsageError("the files hold no text", where=dataset.label)
    return Texts(tuple(documents), tuple(digests))


def _open(spec: DatasetSpec) -> HubDataset:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        return HubDataset(spec.source)
    except SourceError as error:
        cause = error.__cause__
        if isinstance(cause, GatedRepoError) or not isinstance(cause, RepositoryNotFoundError):
            raise
        raise UsageError(  # mostly a path that is misspelt
            f"neither a file or directory here nor a data set on the Hub that is open to you: {spec.source!r}",
            where="--calibration", hint=error.hint,
        ) from error  # fmt: skip


def choose_files(names: tuple[str, ...], spec: DatasetSpec, where: str) -> list[str]:
    """The files of a split, by the rule of the module.

    Raises:
        UsageError: none, or in several folders.
    """
    below = [n for n in names if not spec.path or n == spec.path or n.startswith(f"{spec.path}/")]
    usable = [n for n in below if _is_data(n.split("/"))]
    if not usable:
        at = f"{where}/{spec.path}" if spec.path else where
        raise UsageError("the data set has no file that is read", where=at, accepted=", ".join(_SUFFIXES))
    if usable == [spec.path] and spec.split is None:
        return usable
    splits = {name: _splits_of(name[len(spec.path) :]) for name in usable}
    split = spec.split or DEFAULT_SPLIT
    chosen = [n for n in usable if _has_split(splits[n], n[len(spec.path) :], split)]
    if not chosen and spec.split is None and not any(splits.values()):
        chosen = usable
    if not chosen:
        known = sorted({s for found in splits.values() for s in found})
        raise UsageError(
            f"the data set has no split {split!r}", where=where,
            accepted=f"{where.removeprefix('datasets/')}:SPLIT with {', '.join(known) or 'the name of a file'}",
        )  # fmt: skip
    folders = sorted({name.rpartition("/")[0] for name in chosen})
    if len(folders) > 1:
        raise UsageError(
            f"the split {split!r} lies in {len(folders)} folders", where=where,
            accepted=f"{where.removeprefix('datasets/')}/FOLDER:{split} with {', '.join(folders[:8])}",
        )  # fmt: skip
    return chosen


def _is_data(parts: list[str]) -> bool:
    is_hidden = any(part.startswith(".") for part in parts)
    return parts[-1].endswith(_SUFFIXES) and not is_hidden and parts[-1].lower() not in _NOT_DATA


def _splits_of(path: str) -> tuple[str, ...]:
    """Splits that a path names."""
    shard = _SHARD.match(path.rpartition("/")[2])
    if shard is not None:
        return (shard["split"],)
    return tuple(word for word in _SPLIT_WORDS if _is_word(word, path))


def _has_split(splits: tuple[str, ...], path: str, split: str) -> bool:
    if _SHARD.match(path.rpartition("/")[2]):
        return splits == (split,)
    return _is_word(split, path)


def _is_word(word: str, path: str) -> bool:
    return re.search(rf"(?:^|[-._ /0-9]){re.escape(word)}(?:[-._ /0-9]|$)", path) is not None


def _documents(path: Path, where: str, limit: int) -> Iterator[Document]:
    """Documents with text of a file, in order; a text file is one, cut after ``limit`` bytes."""
    if path.name.endswith(".parquet"):
        yield from _parquet(path, where)
        return
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as file:
            is_text = path.name.removesuffix(".gz").endswith(".txt")
            for document in _text(file, where, min(limit, MAX_BYTES)) if is_text else _json_lines(file, where):
                if document.text is None or document.text.strip():
                    yield document
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise SourceError(f"is damaged: {error}", where=where) from error
    except OSError as error:
        raise EnvironmentProblem(f"cannot be read: {error}", where=where) from error


def _text(file: _Bytes, where: str, limit: int) -> Iterator[Document]:
    content = file.read(limit)
    try:
        yield Document(where, content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        if len(content) < limit or error.reason != "unexpected end of data":  # else the limit cut a character
            raise _not_utf8(where) from None
        yield Document(where, content[: error.start].decode("utf-8-sig"))


def _json_lines(file: _Bytes, where: str) -> Iterator[Document]:
    number = 0
    while line := file.readline(MAX_BYTES):
        number += 1
        at = f"{where}:{number}"
        try:
            text = line.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise _not_utf8(at) from None
        if text.strip():
            yield json_line(text, at)


def _not_utf8(where: str) -> UsageError:
    return UsageError("not UTF-8 text", where=where, accepted="UTF-8")


def _parquet(path: Path, where: str) -> Iterator[Document]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("pyarrow"):
            raise
        raise EnvironmentProblem(
            "is a parquet file, and pyarrow, which reads them, is not installed", where=where,
            hint="Run: pip install 'quantkit[parquet]'.",
        ) from None  # fmt: skip
    try:
        with parquet.ParquetFile(path) as file:
            columns = [c for c in ("text", "messages") if c in file.schema_arrow.names]
            if len(columns) != 1:
                raise UsageError(
                    f"columns {', '.join(file.schema_arrow.names)}", where=where,
                    accepted="a column 'text' or a column 'messages'",
                )  # fmt: skip
            row = 0
            for batch in file.iter_batches(batch_size=256, columns=columns):
                for item in batch.to_pylist():
                    row += 1
                    document = document_of(item, f"{where}, row {row}")
                    if document.text is None or document.text.strip():
                        yield document
    except (pyarrow.ArrowException, OSError) as error:
        raise SourceError(f"cannot be read as parquet: {error}", where=where) from error


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise EnvironmentProblem(f"cannot be read: {error.strerror}", where=str(path)) from None


def _size(document: Document) -> int:
    """Bytes of its text."""
    parts: list[Any] = [document.text] if document.messages is None else [m["content"] for m in document.messages]
    return sum(len(str(part).encode("utf-8", errors="replace")) for part in parts)
