"""Whole files from the Hub into its cache, resumed where an earlier attempt or process ended.

huggingface_hub 1.33 throws the partial file away when a download fails or its process dies: of a 5 GB shard every
byte is asked for again. So plain HTTP files are received here into ``blobs/<etag>.quantkit.incomplete``, checked
against the sha256 that the Hub states, and moved into place; the library then only links the blob into the
snapshot. Files that the Hub stores in Xet are left to the library and hf_xet, which is faster and checks its
chunks. Small files go through the library too: there is nothing to resume; where the Hub states their sha256 (the
library looks at sizes only) they are checked here.

Left out: progress and stopping within a file that hf_xet or the library receives.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from ..errors import EnvironmentProblem, SourceError
from .hub_cache import HubFile, RepoCache
from .hub_errors import disk_problem
from .hub_range import CHUNK, RangeReader

SMALL = 8 << 20  # bytes; below it a download is not worth resuming


OnBytes = Callable[[int], None]


def download(
    reader: RangeReader, cache: RepoCache, name: str, file: HubFile, on_bytes: OnBytes | None = None
) -> Path:
    """Have ``name`` complete in the cache; returns its path in the snapshot.

    Args:
        on_bytes: told the length of every piece, those of an earlier attempt included, and 0 now and then while
            waiting for the server; may raise to stop, the partial file stays.

    Raises:
        SourceError: the repository or the file is gone or not open to the user, or its bytes do not have the
            digest that the Hub states.
        EnvironmentProblem: network or disk.
    """
    tell = on_bytes or (lambda count: None)
    if file.size > SMALL and file.etag and not (cache.blobs / file.etag).exists():
        try:
            if not _is_xet(reader, name):
                _receive(reader, cache, name, file.size, file.etag, tell)
        except OSError as error:
            raise disk_problem(error, f"{reader.repo}/{name}") from error
    path = reader.retry.call(
        lambda: _by_library(reader, cache, name), reader.repo, reader.commit, name, on_wait=lambda: tell(0)
    )
    size = path.stat().st_size
    if size != file.size:
        raise EnvironmentProblem(
            f"the download has {size:,} bytes, the Hub's listing says {file.size:,}",
            where=f"{reader.repo}@{reader.commit}/{name}",
            hint=f"Get it again: hf download {reader.repo} {name} --revision {reader.commit} --force-download",
        )
    if size <= SMALL and file.etag and len(file.etag) == 64:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != file.etag:
            cache.consume(reader.commit, name, file.etag)
            raise _wrong_digest(reader, name, found, file.etag)
    return path


def _wrong_digest(reader: RangeReader, name: str, found: str, stated: str) -> SourceError:
    return SourceError(
        f"the received bytes have the sha256 {found}, the Hub states {stated}",
        where=f"{reader.repo}@{reader.commit}/{name}",
        hint="The download was deleted; run again. If it repeats, the file on the Hub is damaged or a proxy is.",
    )


def _by_library(reader: RangeReader, cache: RepoCache, name: str) -> Path:
    from huggingface_hub import hf_hub_download

    settings = reader.settings
    path = hf_hub_download(
        reader.repo,
        name,
        revision=reader.commit,
        cache_dir=cache.cache_dir,
        endpoint=settings.endpoint,
        token=settings.token,
        library_name="quantkit",
        tqdm_class=quiet_bar(),
    )
    return Path(path)


def quiet_bar() -> type:
    """A progress bar that draws nothing: progress is the command line's affair, and stderr may be a log."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    class Quiet(tqdm):  # type: ignore[misc]
        def __init__(self, *args: object, **kwargs: object) -> None:
            kwargs.pop("name", None)  # huggingface_hub's own argument
            super().__init__(*args, **(kwargs | {"disable": True}))

    return Quiet


def _is_xet(reader: RangeReader, name: str) -> bool:
    """Whether the library would fetch the file with hf_xet."""
    from huggingface_hub import constants, get_hf_file_metadata

    if constants.HF_HUB_DISABLE_XET or importlib.util.find_spec("hf_xet") is None:
        return False
    url, settings = reader.url(name), reader.settings
    metadata = reader.retry.call(
        lambda: get_hf_file_metadata(url, headers=reader.headers, token=False, endpoint=settings.endpoint),
        reader.repo,
        reader.commit,
        name,
    )
    return metadata.xet_file_data is not None


def _receive(reader: RangeReader, cache: RepoCache, name: str, size: int, etag: str, tell: OnBytes) -> None:
    """Receive the blob, continuing a partial one."""
    blob, part = cache.blobs / etag, cache.blobs / f"{etag}.quantkit.incomplete"
    cache.blobs.mkdir(parents=True, exist_ok=True)
    with cache.lock(etag):
        if blob.exists():
            return
        digest = hashlib.sha256()
        done = _hash_part(part, size, digest, tell)
        free = shutil.disk_usage(cache.blobs).free
        if free < size - done:
            raise EnvironmentProblem(
                f"{size - done:,} bytes are to be downloaded, {free:,} are free in {cache.blobs}",
                where=f"{reader.repo}/{name}",
                hint="Free space, or let HF_HUB_CACHE name another disk.",
            )
        with part.open("ab") as out:

            def keep(data: bytes) -> None:
                digest.update(data)
                out.write(data)
                tell(len(data))

            reader.stream(name, size, done, size, keep, on_wait=lambda: tell(0))
        if len(etag) == 64 and digest.hexdigest() != etag:
            part.unlink()
            raise _wrong_digest(reader, name, digest.hexdigest(), etag)
        part.replace(blob)


def _hash_part(part: Path, size: int, digest: hashlib._Hash, tell: OnBytes) -> int:
    """Feed what an earlier attempt left to ``digest``; returns its length (0 when it can't be a prefix)."""
    if not part.exists():
        return 0
    if part.stat().st_size > size:
        os.truncate(part, 0)
    done = 0
    with part.open("rb") as file:
        while data := file.read(CHUNK):
            digest.update(data)
            done += len(data)
            tell(len(data))
    return done
