"""A model repository on the Hugging Face Hub as a ``FileStore``.

Opening asks the Hub one question (which commit, which files) and pins every later read to that commit. Files in
the local cache are read there; of the others, ranges are read over HTTP until somebody asks for the whole file,
so that `plan` needs the headers only. Small files (config, tokenizer) are cached whole as every Hub tool does,
so that a later run without network finds them.

Offline (HF_HUB_OFFLINE), the cache is the source: the Hub's listing where `hf download` left one, else what the
snapshot holds and what its index names. Caches without symbolic links do not tell ETags offline.

Left out: datasets, spaces, buckets; writing to the Hub.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from ..errors import EnvironmentProblem, SourceError, UsageError
from .hub_cache import HubFile, RepoCache, check_name
from .hub_download import download
from .hub_errors import Retry, missing_offline
from .hub_range import RangeReader
from .hub_settings import COMMIT, is_hub_id, read_settings, split_hub_id

__all__ = ["HubStore", "Retry", "is_hub_id", "split_hub_id"]

INDEX = "model.safetensors.index.json"
_LISTING_TIMEOUT_S = 20.0
_CACHED_WHOLE = 64 << 20  # bytes; the index of a model with 118,629 tensors has some 10 MB, a tokenizer 20
_SHARD = re.compile(r".+-of-\d+\.safetensors")


class HubStore:
    """The files of a repository at one commit. Thread-safe.

    Args:
        source: ``org/name`` or ``org/name@revision``.
        revision: branch, tag or commit; ``main`` by default.
        cache_dir: the Hub cache; from HF_HUB_CACHE or HF_HOME by default.
        token: a token, False for none; from HF_TOKEN or the login by default.
        retry: how often failed requests are repeated.

    Attributes:
        warnings: what the user should know about where the files come from.

    Raises:
        UsageError: not a repository id or not a revision.
        SourceError: no such repository or revision, or no access.
        EnvironmentProblem: the Hub can't be reached and the cache does not suffice.
    """

    kind = "hub"
    parallel_reads = 8

    def __init__(
        self,
        source: str,
        *,
        revision: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        token: str | bool | None = None,
        retry: Retry | None = None,
    ) -> None:
        self.repo, self._wanted = split_hub_id(source, revision)
        self.label = self.repo
        self.warnings: tuple[str, ...] = ()
        self._settings = read_settings(cache_dir, token)
        self._retry = retry or Retry()
        self._cache = RepoCache(self._settings.cache_dir, self.repo)
        self._closed = False
        self._copies: dict[str, Path] = {}
        self.revision: str
        self.revision, listed = self._offline() if self._settings.offline else self._online()
        names = [check_name(name, self.repo) for name in sorted(listed)]
        self._files = {name: listed[name] for name in names if not _hidden(name)}
        self._sizes = MappingProxyType({name: file.size for name, file in self._files.items()})
        self._reader = RangeReader(self._settings, self.repo, self.revision, self._retry)

    def names(self) -> Mapping[str, int]:
        """File names and sizes in bytes at this commit; hidden files are left out."""
        return self._sizes

    def etag(self, name: str) -> str | None:
        """sha256 of an LFS file, git sha1 of a small one."""
        return self._file(name).etag

    def expected_sha256(self, name: str) -> str | None:
        """The digest that the Hub states for the bytes of a file, if it states one (LFS files)."""
        etag = self._file(name).etag
        return etag if etag is not None and len(etag) == 64 else None

    def read_at(self, name: str, offset: int, length: int) -> bytes:
        """``length`` bytes from ``offset``, from the cache or by range request."""
        buffer = bytearray(length)
        self.readinto(name, offset, memoryview(buffer))
        return bytes(buffer)

    def readinto(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset``, from the cache or by range request."""
        view = buffer.cast("B")
        file = self._file(name)
        if offset < 0 or offset + len(view) > file.size:
            raise SourceError(
                f"has {file.size:,} bytes; bytes {offset:,} to {offset + len(view):,} are needed",
                where=f"{self.repo}/{name}",
            )
        path = self._find(name, file)
        if path is None and file.size <= _CACHED_WHOLE and not name.endswith(".safetensors"):
            path = self.fetch(name)
        if path is not None:
            _read_file(path, offset, view)
        elif len(view):
            self._need_network(name)
            self._reader.readinto(name, file.size, offset, view, self._check_open)

    def local_path(self, name: str, download: bool = False) -> Path | None:
        """Path of the complete file in the cache; downloads it when asked to, else None without one."""
        return self.fetch(name) if download else self._find(name, self._file(name))

    def fetch(self, name: str, on_bytes: Callable[[int], None] | None = None) -> Path:
        """Have the complete file in the cache (or adopted); resumes a broken download. See ``FileStore.fetch``."""
        file = self._file(name)
        path = self._find(name, file)
        if path is not None:
            return path
        self._need_network(name)

        def tell(count: int) -> None:
            self._check_open()
            if on_bytes is not None:
                on_bytes(count)

        path = download(self._reader, self._cache, name, file, tell)
        self._cache.write_ref(self._wanted, self.revision)
        return path

    def adopt(self, name: str, path: Path) -> None:
        """Read the file at ``path`` when the cache does not hold it (any more)."""
        self._file(name)
        self._copies[name] = path

    @property
    def download_dir(self) -> Path:
        """The cache, or what exists of the way to it."""
        folder = self._settings.cache_dir
        return next(path for path in (folder, *folder.parents) if path.is_dir())

    def drop_cache(self, name: str) -> None:
        """Let the operating system forget the pages of the local copy."""
        path = self._find(name, self._file(name))
        if path is None or not hasattr(os, "posix_fadvise"):
            return
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:  # deleted meanwhile: nothing is left to forget
            return
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

    def consume(self, name: str) -> None:
        """Delete the cached copy, and its bytes unless another snapshot uses them. Idempotent."""
        self._cache.consume(self.revision, name, self._file(name).etag)

    def close(self) -> None:
        """Later reads are an error, and those that wait for the server end with one; the connections belong to
        huggingface_hub's shared client.
        """
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the checkpoint was closed before this read", where=self.repo)

    def _file(self, name: str) -> HubFile:
        self._check_open()
        try:
            return self._files[name]
        except KeyError:
            raise SourceError(f"has no file {name!r}", where=f"{self.repo}@{self.revision}") from None

    def _find(self, name: str, file: HubFile) -> Path | None:
        """The complete copy on disk: in the cache, else the adopted one."""
        path = self._cache.find(self.revision, name, file)
        copy = self._copies.get(name)
        return copy if path is None and copy is not None and copy.is_file() else path

    def _need_network(self, name: str) -> None:
        if self._settings.offline:
            raise missing_offline(self.repo, self.revision, [name])

    def _online(self) -> tuple[str, Mapping[str, HubFile]]:
        """Commit and files from the Hub; from the cache alone when that is certain to be the same."""
        pinned = self._wanted if COMMIT.fullmatch(self._wanted) else None
        if pinned and (listed := self._cache.listing(pinned)) and not self._missing(pinned, listed):
            return pinned, listed
        try:
            return self._ask_hub()
        except EnvironmentProblem as error:
            try:
                commit, listed = self._offline()
            except EnvironmentProblem:
                raise error from error.__cause__
            self.warnings = (f"{error.what}; the cached commit {commit} of {self.repo} is used",)
            return commit, listed

    def _ask_hub(self) -> tuple[str, Mapping[str, HubFile]]:
        from huggingface_hub import HfApi

        api = HfApi(endpoint=self._settings.endpoint, token=self._settings.token, library_name="quantkit")
        info = self._retry.call(
            lambda: api.model_info(
                self.repo, revision=self._wanted, files_metadata=True, timeout=_LISTING_TIMEOUT_S
            ),
            self.repo,
            self._wanted,
        )
        if info.sha is None or not COMMIT.fullmatch(info.sha):
            raise EnvironmentProblem(f"the Hub names no commit for {self._wanted}", where=self.repo)
        files: dict[str, HubFile] = {}
        for item in info.siblings or ():
            if item.lfs is not None:
                files[item.rfilename] = HubFile(item.lfs.size, item.lfs.sha256)
            elif item.size is not None:
                files[item.rfilename] = HubFile(item.size, item.blob_id)
            else:
                raise EnvironmentProblem(
                    f"the Hub states no size for {item.rfilename}",
                    where=self.repo,
                    hint="HF_ENDPOINT must name a server with the Hub's full interface.",
                )
        return info.sha, files

    def _offline(self) -> tuple[str, Mapping[str, HubFile]]:
        """Commit and files from the cache; every tensor file that is known of must be there."""
        commit = self._cache.read_ref(self._wanted)
        held = self._cache.files(commit) if commit else {}
        if commit is None or not any(name.endswith(".safetensors") for name in held):
            raise missing_offline(self.repo, self._wanted, [])
        listed = self._cache.listing(commit)
        if listed is None and INDEX not in held and any(_SHARD.fullmatch(name) for name in held):
            raise missing_offline(self.repo, self._wanted, [INDEX])  # else a part would pass for the whole
        named = set(listed or ()) | self._index_names(commit, held)
        absent = sorted(n for n in named - set(held) if "/" not in n and n.endswith(".safetensors"))
        absent = [n for n in absent if not (listed and n in listed and self._cache.find(commit, n, listed[n]))]
        if absent:
            raise missing_offline(self.repo, self._wanted, absent)
        return commit, listed or held

    def _missing(self, commit: str, listed: Mapping[str, HubFile]) -> list[str]:
        return [n for n, f in listed.items() if not _hidden(n) and self._cache.find(commit, n, f) is None]

    def _index_names(self, commit: str, held: Mapping[str, HubFile]) -> set[str]:
        """Files that the index of a cached snapshot names; a broken index is left to its own reader."""
        try:
            weight_map = json.loads((self._cache.snapshot(commit) / INDEX).read_bytes())["weight_map"]
            names: Iterable[object] = weight_map.values()
            return {name for name in names if isinstance(name, str)}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return set()


def _hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _read_file(path: Path, offset: int, view: memoryview) -> None:
    """Fill ``view`` by pread; a descriptor per read costs microseconds and can't leak or go stale."""
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        raise EnvironmentProblem(f"cannot be read: {error.strerror}", where=os.fspath(path)) from error
    try:
        done = 0
        while done < len(view):
            count = os.preadv(fd, [view[done : done + (1 << 30)]], offset + done)
            if count == 0:
                raise SourceError(f"ends at byte {offset + done:,}", where=os.fspath(path))
            done += count
    except OSError as error:
        raise EnvironmentProblem(f"cannot be read: {error.strerror}", where=os.fspath(path)) from error
    finally:
        os.close(fd)
