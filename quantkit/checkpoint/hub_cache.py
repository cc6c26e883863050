"""One repository in the local Hub cache: what is there, and how a file is given up again.

The layout is huggingface_hub's documented one, shared with every other tool on the machine::

    models--org--name/refs/main                 commit hash
    models--org--name/snapshots/<commit>/FILE   link to ../../blobs/<etag> (a plain file where links don't work)
    models--org--name/blobs/<etag>              the bytes; for Xet files possibly a link into <cache>/blobs/

Deleting is the dangerous part: only the link of this snapshot goes, its blob only when no other snapshot links to
it, and nothing outside this repository's folder is touched (the shared Xet store is left to huggingface_hub's own
reference counting).
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import SourceError, UsageError
from .hub_settings import COMMIT

_ETAG = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file as the Hub lists it: size in bytes, etag = sha256 (LFS) or git sha1; None when not known."""

    size: int
    etag: str | None


def check_name(name: str, repo: str) -> str:
    """A file name of a listing, if it is safe to use below a snapshot folder."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or "\\" in name or "\0" in name or ".." in parts:
        raise SourceError(f"lists a file with the unsafe name {name!r}", where=repo)
    return name


class RepoCache:
    """The cache of one repository.

    Args:
        cache_dir: the Hub cache.
        repo: ``org/name``.
        kind: ``models`` or ``datasets``.
    """

    def __init__(self, cache_dir: Path, repo: str, *, kind: str = "models") -> None:
        self.cache_dir, self.repo = cache_dir, repo
        self.folder = cache_dir / f"{kind}--{repo.replace('/', '--')}"
        self.blobs = self.folder / "blobs"

    def snapshot(self, commit: str) -> Path:
        """Folder of the files of a commit; need not exist."""
        return self.folder / "snapshots" / commit

    def read_ref(self, revision: str) -> str | None:
        """Commit that a branch or tag pointed at when it was last used; a commit hash stands for itself."""
        if COMMIT.fullmatch(revision):
            return revision
        try:
            commit = (self.folder / "refs" / revision).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return None
        return commit if COMMIT.fullmatch(commit) else None

    def write_ref(self, revision: str, commit: str) -> None:
        """Remember the commit of a branch or tag for offline use."""
        if revision == commit or self.read_ref(revision) == commit:
            return
        path = self.folder / "refs" / revision
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        draft.write_text(commit, encoding="ascii")
        draft.replace(path)

    def find(self, commit: str, name: str, file: HubFile) -> Path | None:
        """The complete local copy: of this snapshot, or a blob that another snapshot brought; None without.

        Raises:
            SourceError: the copy has another size than the Hub states.
        """
        places = [self.snapshot(commit) / name]
        if file.etag and _ETAG.fullmatch(file.etag):
            places.append(self.blobs / file.etag)
        for path in places:
            size = _size(path)
            if size is not None:
                if size != file.size:
                    raise SourceError(
                        f"the cached copy has {size:,} bytes, the Hub states {file.size:,}",
                        where=os.fspath(path),
                        hint=f"Get it again: hf download {self.repo} {name} --revision {commit} --force-download",
                    )
                return path
        return None

    def files(self, commit: str) -> dict[str, HubFile]:
        """What the snapshot holds, without a look at the Hub."""
        root = self.snapshot(commit)
        found: dict[str, HubFile] = {}
        for path in _files_below(root):
            size = _size(path)
            if size is not None:
                blob = self._blob_of(path)
                etag = blob.name if blob is not None and _ETAG.fullmatch(blob.name) else None
                found[path.relative_to(root).as_posix()] = HubFile(size, etag)
        return found

    def listing(self, commit: str) -> Mapping[str, HubFile] | None:
        """The Hub's own listing of a commit, where `hf download` left it in the cache; None otherwise.

        Read here, because huggingface_hub's ``get_cached_repo_tree`` (1.33) drops the sha256 of LFS files.
        """
        try:
            tree = json.loads((self.folder / "trees" / f"{commit}.json").read_bytes())
            if tree["format_version"] != 1:
                return None
            return {name: _listed(item) for name, item in tree["files"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def lock(self, etag: str) -> AbstractContextManager[object]:
        """The lock that huggingface_hub takes while it writes this blob."""
        from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

        path = self.cache_dir / ".locks" / self.folder.name / f"{etag}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        return WeakFileLock(path)

    def consume(self, commit: str, name: str, etag: str | None) -> int:
        """Delete a file of a snapshot, and its bytes unless another snapshot links to them.

        Returns:
            Bytes of the blob that was deleted; 0 when nothing was left to delete or others still use it.

        Raises:
            UsageError: the file lies outside of this repository's cache.
        """
        link = self.snapshot(commit) / name
        blob = self.blobs / etag if etag and _ETAG.fullmatch(etag) else None
        if not self.folder.is_dir():
            return 0
        linked = self._blob_of(link)
        if linked is None and link.is_symlink():
            self._refuse(link)
        blob = linked or blob
        if os.path.lexists(link):
            home = self.folder.resolve() / "snapshots" / commit
            if not link.parent.resolve().is_relative_to(home):
                self._refuse(link)
            if not link.is_symlink():
                size = link.stat().st_size
                link.unlink()
                return size
        if blob is None:
            return 0
        with self.lock(blob.name):
            link.unlink(missing_ok=True)
            return 0 if self._is_linked(blob) else self._delete_blob(blob)

    def _refuse(self, link: Path) -> None:
        raise UsageError(
            "lies outside of the Hub cache and is not deleted", where=os.fspath(link), hint="Do not use --consume."
        )

    def _blob_of(self, link: Path) -> Path | None:
        """The blob of this repository that a snapshot link names; None for anything else.

        Also for a link that another thread or process deletes meanwhile: links are asked, not looked for first.
        """
        try:
            named = link.readlink()
        except OSError:
            return None
        target = Path(os.path.normpath(link.parent.resolve() / named))
        home = self.folder.resolve() / "blobs"
        return self.blobs / target.name if target.parent == home else None

    def _is_linked(self, blob: Path) -> bool:
        snapshots = self.folder / "snapshots"
        return any(self._blob_of(path) == blob for path in _files_below(snapshots))

    def _delete_blob(self, blob: Path) -> int:
        if not os.path.lexists(blob):
            return 0
        if not blob.is_symlink():
            size = blob.stat().st_size
            blob.unlink()
            return size
        try:
            from huggingface_hub.utils._shared_blobs import shared_blob_target, sweep_shared_blob
        except ImportError:  # an older huggingface_hub, which makes no such links: leave the target alone
            blob.unlink()
            return 0
        shared = shared_blob_target(blob, self.cache_dir)
        blob.unlink()
        return sweep_shared_blob(shared, cache_dir=self.cache_dir) if shared is not None else 0


def _size(path: Path) -> int | None:
    """Bytes of a file or of what a link leads to; None without one."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _listed(item: dict[str, Any]) -> HubFile:
    is_lfs = item.get("lfs_sha256") is not None
    return HubFile(int(item["lfs_size" if is_lfs else "size"]), str(item["lfs_sha256" if is_lfs else "blob_id"]))


def _files_below(folder: Path) -> Iterator[Path]:
    """Files and links below a folder; links to folders are not followed."""
    for place, _, names in os.walk(folder):
        for name in sorted(names):
            yield Path(place) / name
