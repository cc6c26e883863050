"""A data set repository on the Hub: which commit, which files, and a file on disk.

Files of text are small beside weights, so everything is huggingface_hub's own: the commit and its listing are
asked for once, files are downloaded whole into the Hub cache. The listing is kept in the cache beside them: which
files are taken depends on it, and with it a pinned commit, and any revision offline, is the same data set again.

Left out: falling back to the cache when the Hub can't be reached (another commit would be other calibration data,
which must be asked for by HF_HUB_OFFLINE), resumed downloads, data sets that are made by a script.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from ..errors import EnvironmentProblem
from .hub_cache import RepoCache, check_name
from .hub_errors import Retry, missing_offline
from .hub_settings import COMMIT, read_settings, split_hub_id

_TIMEOUT_S = 20.0


class HubDataset:
    """The files of a data set at one commit.

    Args:
        source: ``org/name`` or ``org/name@revision``.
        retry: how often failed requests are repeated.

    Attributes:
        label: ``datasets/org/name``, as in the Hub's addresses.
        commit: what the revision pointed at.
        names: of all files, sorted.

    Raises:
        UsageError: not a repository id or not a revision.
        SourceError: no such repository or revision, or no access.
        EnvironmentProblem: the Hub can't be reached, or offline and not in the cache.
    """

    def __init__(self, source: str, *, retry: Retry | None = None) -> None:
        self.repo, self._wanted = split_hub_id(source)
        self.label = f"datasets/{self.repo}"
        self._settings, self._retry = read_settings(), retry or Retry()
        self._cache = RepoCache(self._settings.cache_dir, self.repo, kind="datasets")
        self.commit, names = self._cached() or self._ask_hub()
        self.names = tuple(sorted(check_name(name, self.label) for name in names))

    def fetch(self, name: str) -> Path:
        """The file on disk; downloaded unless the cache holds it.

        Raises:
            SourceError: access is refused.
            EnvironmentProblem: network or disk.
        """
        path = self._cache.snapshot(self.commit) / name
        if path.is_file():
            return path
        if self._settings.offline:
            raise missing_offline(self.label, self.commit, [name])
        return self._retry.call(lambda: self._download(name), self.label, self.commit, name)

    def _download(self, name: str) -> Path:
        from huggingface_hub import hf_hub_download

        from .hub_download import quiet_bar

        settings = self._settings
        return Path(
            hf_hub_download(
                self.repo, name, repo_type="dataset", revision=self.commit, cache_dir=settings.cache_dir,
                endpoint=settings.endpoint, token=settings.token, library_name="quantkit", tqdm_class=quiet_bar(),
            )
        )  # fmt: skip

    def _cached(self) -> tuple[str, list[str]] | None:
        """Commit and listing where the cache settles both: offline, or for a pinned commit."""
        if not self._settings.offline and not COMMIT.fullmatch(self._wanted):
            return None
        commit = self._cache.read_ref(self._wanted)
        names = self._read_listing(commit) if commit else None
        if commit is not None and names is not None:
            return commit, names
        if self._settings.offline:
            raise missing_offline(self.label, self._wanted, [])
        return None

    def _ask_hub(self) -> tuple[str, list[str]]:
        from huggingface_hub import HfApi

        api = HfApi(endpoint=self._settings.endpoint, token=self._settings.token, library_name="quantkit")
        info = self._retry.call(
            lambda: api.dataset_info(self.repo, revision=self._wanted, timeout=_TIMEOUT_S),
            self.label,
            self._wanted,
        )
        if info.sha is None or not COMMIT.fullmatch(info.sha):
            raise EnvironmentProblem(f"the Hub names no commit for {self._wanted}", where=self.label)
        names = [item.rfilename for item in info.siblings or ()]
        self._keep_listing(info.sha, names)
        return info.sha, names

    def _listing(self, commit: str) -> Path:
        return self._cache.folder / "quantkit" / f"{commit}.json"

    def _read_listing(self, commit: str) -> list[str] | None:
        """Ours, or the one that `hf download` left."""
        try:
            names = json.loads(self._listing(commit).read_bytes())
        except (OSError, ValueError):
            names = None
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            return names
        listed = self._cache.listing(commit)
        return None if listed is None else list(listed)

    def _keep_listing(self, commit: str, names: list[str]) -> None:
        path = self._listing(commit)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
            draft.write_text(json.dumps(names), encoding="utf-8")
            draft.replace(path)
            self._cache.write_ref(self._wanted, commit)
        except OSError as error:
            raise EnvironmentProblem(f"cannot be written: {error.strerror}", where=str(path)) from None
