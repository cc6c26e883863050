"""From what the user typed to a checkpoint: a path, a bundled model or a hub repository, in this order."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path

from ..errors import SourceError, UnsupportedError, UsageError
from .checkpoint import Checkpoint
from .index import INDEX_SUFFIX, SUFFIX
from .local import LocalStore
from .store import FileStore

BUNDLED = {"tiny-glm": "tiny-glm-5.2-fp8", "tiny-qwen3": "tiny-qwen3-moe-fp8"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[^@\s]+)?")


def open_checkpoint(
    source: str | os.PathLike[str],
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    token: str | None = None,
) -> Checkpoint:
    """Open a checkpoint; reads its index and headers only.

    Args:
        source: a folder, one .safetensors file, a bundled name (``tiny-glm``, ``tiny-qwen3``) or a hub id
            ``org/name`` or ``org/name@revision``.
        revision: branch, tag or commit of a hub id.
        cache_dir: hub cache, instead of the usual one.
        token: access token of the hub, instead of the stored one.

    Raises:
        UsageError: there is nothing of this name, or ``revision`` is given for a source that has none.
        SourceError: the checkpoint is incomplete or corrupt.
        UnsupportedError: it is no safetensors checkpoint.
        EnvironmentProblem: disk, permissions or network.
    """
    store = open_store(source, revision=revision, cache_dir=cache_dir, token=token)
    try:
        return Checkpoint(store)
    except BaseException:
        store.close()
        raise


def expand_home(text: str) -> Path:
    """A path with ``~`` filled in; where there is no such home, the text as it stands."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def is_hub_id(text: str) -> bool:
    """Whether a text has the form of a hub repository, ``org/name`` or ``org/name@revision``."""
    return _HUB_ID.fullmatch(text) is not None


def open_store(
    source: str | os.PathLike[str],
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    token: str | None = None,
) -> FileStore:
    """The files of a source, see ``open_checkpoint``."""
    text = os.fspath(source)
    path = expand_home(text)
    bundled = BUNDLED.get(text)
    is_path = bool(text) and os.path.lexists(path)
    if not is_path and bundled is None and isinstance(source, str) and is_hub_id(text):
        from .hub import HubStore

        return HubStore(text, revision=revision, cache_dir=cache_dir, token=token)
    if revision is not None:
        raise UsageError(
            f"revision {revision!r} is given, but {text} is not a hub repository",
            accepted="a revision of org/name",
        )
    if is_path:
        _check_path(path)
        return LocalStore(path, label=text)
    if bundled is not None:
        return _bundled(text, bundled)
    near = get_close_matches(text, BUNDLED, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]}?" if near else None
    if match := re.match(r"https?://[^/]+/([^/]+/[^/?#]+)", text):
        hint = f"Give the repository's id instead of its address: {match[1]}"
    raise UsageError(
        f"no such file, folder or model: {text!r}",
        where="source",
        accepted=f"a folder, a .safetensors file, a hub id org/name, or a bundled model ({', '.join(BUNDLED)})",
        hint=hint,
    )


def _bundled(label: str, folder: str) -> LocalStore:
    path = Path(str(files("quantkit.data"))) / "models" / folder
    if not path.is_dir():
        raise SourceError(
            "the bundled model is not part of this installation", where=label, hint="Install quantkit again."
        )
    return LocalStore(path, label=label, kind="bundled")


def _check_path(path: Path) -> None:
    """Refuse what is plainly something else, with the way to what is meant."""
    if path.is_dir():
        if (path / "manifest.json").is_file() and any((path / view).is_dir() for view in ("decode", "prefill")):
            raise UnsupportedError(
                "is a quantkit artifact, not a checkpoint",
                where=str(path),
                hint=f"Its views are checkpoints: open {path / 'decode'} or {path / 'prefill'}.",
            )
    elif path.is_file() and path.suffix != SUFFIX:
        hint = "Open the folder that holds it." if path.name.endswith((INDEX_SUFFIX, "config.json")) else None
        raise UnsupportedError(
            "is not a safetensors file", where=str(path), accepted="a folder or a .safetensors file", hint=hint
        )
