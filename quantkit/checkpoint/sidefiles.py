"""Files of a checkpoint that are not weights and travel with it: tokenizer, templates, remote code, licence."""

from __future__ import annotations

from dataclasses import dataclass

from .index import INDEX_SUFFIX, OTHER_WEIGHTS, SUFFIX, is_text
from .store import FileStore

MAX_SIDE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class SideFile:
    """A file that is copied as it is; ``name`` may contain folders (``figures/a.png``)."""

    name: str
    nbytes: int


def side_files(store: FileStore) -> tuple[tuple[SideFile, ...], tuple[str, ...]]:
    """Side files sorted by name, config.json included, and warnings about what is left out.

    Left out: weights of any kind and their index, hidden files, paths that could leave the folder, names that are
    no text (no manifest could hold them), files over 1 GiB, and every folder that holds weights, since that is
    another model (or an earlier output).
    """
    names = store.names()
    models = {name.split("/")[0] for name in names if "/" in name and _is_weights(name)}
    kept: list[SideFile] = []
    warnings = [f"folder {folder}/ holds weights of its own and is left out" for folder in sorted(models)]
    others = [name for name in names if "/" not in name and name.lower().endswith(OTHER_WEIGHTS)]
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        warnings.append(f"{others[0]}{more} in another weights format: left out")
    for name, size in sorted(names.items()):
        parts = name.split("/")
        if _is_weights(name) or (len(parts) > 1 and parts[0] in models):
            continue
        if any(part in ("", "..") or part.startswith(".") or "\\" in part or "\0" in part for part in parts):
            continue
        if not is_text(name):
            warnings.append(f"the file name {name!a} is not valid UTF-8: left out")
            continue
        if size > MAX_SIDE_BYTES:
            warnings.append(f"{name} ({size:,} bytes) is over 1 GiB and is left out")
            continue
        kept.append(SideFile(name, size))
    return tuple(kept), tuple(warnings)


def _is_weights(name: str) -> bool:
    low = name.lower()
    return low.endswith((SUFFIX, INDEX_SUFFIX, ".bin.index.json", *OTHER_WEIGHTS))
