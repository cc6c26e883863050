"""Which files hold the weights, and whether the index tells the truth about them.

The headers are the truth and the index is a claim about them: it is checked tensor by tensor, because a loader
that trusts a stale index drops tensors without a word. A weights file that the index does not mention (the
``mtp.safetensors`` of several publishers) is read too, with a warning.

File names of an index come from strangers and become paths, so only plain names are taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from ..errors import SourceError, UnsupportedError
from .header import parse_json_object
from .store import FileStore
from .tensor import TensorInfo

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".ckpt", ".onnx")
_MISTRAL = "consolidated"  # the same weights once more under Mistral's own names
_NUMBERED = re.compile(r"(?P<stem>.*?)-?(?P<number>\d+)-of-(?P<count>\d+)\.safetensors")
_REBUILD = "Download the checkpoint again, or delete the index if it is stale: without one the headers are read."


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The weights files of a checkpoint.

    Attributes:
        files: names, sorted.
        index: name of the index file, None when there is none.
        claims: tensor name to file name as the index states it.
        outside: those of ``files`` that the index does not mention.
        warnings: what the user should know.
    """

    files: tuple[str, ...]
    index: str | None
    claims: Mapping[str, str]
    outside: tuple[str, ...]
    warnings: tuple[str, ...]


def find_weight_files(store: FileStore) -> WeightFiles:
    """Weights files at the top level of a checkpoint; reads the index, no header.

    Raises:
        SourceError: the index is damaged, names a file that is missing or not a plain name, or there is no
            index and the numbered files are not complete.
        UnsupportedError: there is no safetensors file.
    """
    top = [name for name in store.names() if "/" not in name]
    present = {name for name in top if name.endswith(SUFFIX)}
    if unreadable := next((name for name in sorted(present) if not is_text(name)), None):
        raise SourceError(
            f"the file name {unreadable!a} is not valid UTF-8", where=store.label, hint="Rename the file."
        )
    indexes = [name for name in top if name.endswith(INDEX_SUFFIX) and not name.startswith(_MISTRAL)]
    if not present and not indexes:
        _no_weights(store, top)
    mistral = {name for name in present if name.startswith(_MISTRAL)}
    if mistral != present:
        present -= mistral
    else:
        mistral = set()
    warnings = [
        f"{name} is left out: consolidated files repeat the weights in another layout" for name in sorted(mistral)
    ]
    index = _choose_index(store, indexes)
    if index is None:
        _check_numbering(store, present)
        return WeightFiles(tuple(sorted(present)), None, {}, (), tuple(warnings))
    claims = _read_index(store, index)
    _check_present(claims, present | mistral, index)
    named = set(claims.values())
    outside = sorted(present - named)
    warnings += [f"{name} is not named by {index}; its tensors are read all the same" for name in outside]
    return WeightFiles(tuple(sorted(named | present)), index, claims, tuple(outside), tuple(warnings))


def is_text(name: str) -> bool:
    """Whether a file name is valid Unicode; Linux names may be any bytes, which Python shows as surrogates."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_claims(found: WeightFiles, tensors: Mapping[str, TensorInfo]) -> None:
    """Compare the index with the headers.

    Raises:
        SourceError: a tensor that the index places in a file is not there, or a file that the index names holds a
            tensor that the index does not know.
    """
    if found.index is None:
        return
    for name, file in found.claims.items():
        tensor = tensors.get(name)
        if tensor is None or tensor.file != file:
            seen = "no file holds it" if tensor is None else f"it is in {tensor.file}"
            raise SourceError(
                f"the index places tensor {name!r} in {file}, but {seen}", where=found.index, hint=_REBUILD
            )
    outside = set(found.outside)
    for name, tensor in tensors.items():
        if name not in found.claims and tensor.file not in outside:
            raise SourceError(
                f"{tensor.file} holds tensor {name!r}, which the index does not know",
                where=found.index,
                hint=_REBUILD,
            )


def _no_weights(store: FileStore, top: Iterable[str]) -> NoReturn:
    others = [name for name in top if name.lower().endswith(OTHER_WEIGHTS)]
    if others:
        raise UnsupportedError(
            f"holds {others[0]} but no safetensors file",
            where=store.label,
            accepted="safetensors checkpoints",
            hint="Convert it to safetensors first (transformers: save_pretrained).",
        )
    inside = sorted({name.rpartition("/")[0] for name in store.names() if name.endswith(SUFFIX)})
    if inside:
        more = ", ..." if len(inside) > 3 else ""
        hint = f"There are some in {', '.join(inside[:3])}{more}: open that folder instead."
    else:
        hint = "Give the folder that holds the *.safetensors files and their config.json."
    raise UnsupportedError("holds no safetensors file", where=store.label, hint=hint)


def _choose_index(store: FileStore, indexes: list[str]) -> str | None:
    preferred = "model" + INDEX_SUFFIX
    if preferred in indexes:
        return preferred
    if len(indexes) > 1:
        raise SourceError(
            f"several index files and none is {preferred}: {', '.join(indexes)}",
            where=store.label,
            hint="Keep the one that belongs to the weights in a folder of its own.",
        )
    return indexes[0] if indexes else None


def _read_index(store: FileStore, index: str) -> dict[str, str]:
    try:
        content = parse_json_object(store.read_at(index, 0, store.names()[index]).decode("utf-8"))
    except ValueError as error:
        raise SourceError(f"is not a readable index: {error}", where=index, hint=_REBUILD) from error
    claims = content.get("weight_map")
    if not isinstance(claims, dict) or not all(isinstance(file, str) for file in claims.values()):
        raise SourceError("has no weight_map from tensor names to file names", where=index, hint=_REBUILD)
    for file in set(claims.values()):
        if not is_plain_name(file) or not file.endswith(SUFFIX):
            tensor = next(name for name, value in claims.items() if value == file)
            raise SourceError(
                f"places tensor {tensor!r} in {file!r}, which is not a safetensors file of this folder",
                where=index,
                accepted="plain file names, without folders, '..' or absolute paths",
                hint="Put all shards in one folder: an index that points elsewhere is never followed.",
            )
    return claims


def is_plain_name(name: str) -> bool:
    """A file name that stays in its folder on every system."""
    return (
        bool(name)
        and name not in (".", "..")
        and not re.search(r"[/\\\0]", name)
        and not re.match(r"[A-Za-z]:", name)
    )


def _check_present(claims: Mapping[str, str], present: set[str], index: str) -> None:
    absent = set(claims.values()) - present
    if not absent:
        return
    missing = sorted(absent)
    lost = [name for name, file in claims.items() if file in absent]
    raise SourceError(
        f"names {_some(missing, 'file')} that {'is' if len(missing) == 1 else 'are'} not there; "
        f"{_some([repr(name) for name in lost], 'tensor')} would be lost",
        where=index,
        hint="Download the missing files; quantkit never goes on without them.",
    )


def _check_numbering(store: FileStore, present: set[str]) -> None:
    """Without an index, ``-00002-of-00006`` is the only witness of a missing file."""
    sets: dict[tuple[str, int], set[int]] = {}
    for name in present:
        if match := _NUMBERED.fullmatch(name):
            sets.setdefault((match["stem"], int(match["count"])), set()).add(int(match["number"]))
    for (stem, count), numbers in sorted(sets.items()):
        if len(numbers) != count:
            gaps = [str(n) for n in range(1, min(count, len(numbers) + 8) + 1) if n not in numbers]
            raise SourceError(
                f"{len(numbers)} of the {count} files {stem}-*-of-{count:05d}{SUFFIX} are there and no index says "
                f"whether that is all (numbers missing: {', '.join(gaps[:8]) or 'none'})",
                where=store.label,
                hint=f"Download the missing files, or model{INDEX_SUFFIX} if it was left out.",
            )


def _some(items: list[str], noun: str, limit: int = 3) -> str:
    more = f" and {len(items) - limit:,} more" if len(items) > limit else ""
    return f"{len(items):,} {noun}{'' if len(items) == 1 else 's'} ({', '.join(items[:limit])}{more})"
