"""Which Hub, which cache, which token: read from the environment when a source is opened.

huggingface_hub reads its variables once, at import. Reading them here at call time and passing the values on
explicitly makes a changed variable take effect in a running process (notebooks, tests), and keeps the import of
huggingface_hub, which costs some 0.3 s, out of start-up.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError

COMMIT = re.compile(r"[0-9a-f]{40}")
DEFAULT_REVISION = "main"

_PART = r"(?!.*(?:--|\.\.))[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_REPO = re.compile(rf"{_PART}/{_PART}")
_REVISION = re.compile(r"(?!.*(?:\.\.|//))[A-Za-z0-9_][A-Za-z0-9._/+-]{0,200}")


@dataclass(frozen=True, slots=True)
class HubSettings:
    """Where to look for a repository.

    Attributes:
        endpoint: base URL without a slash at the end.
        cache_dir: the Hub cache (``.../hub``), which holds ``models--org--name`` folders.
        token: explicit token, None to let huggingface_hub look (HF_TOKEN, then its token file), False for none.
        offline: only the cache may be used.
    """

    endpoint: str
    cache_dir: Path
    token: str | bool | None
    offline: bool


def read_settings(
    cache_dir: str | os.PathLike[str] | None = None,
    token: str | bool | None = None,
    environ: Mapping[str, str] | None = None,
) -> HubSettings:
    """The settings from HF_ENDPOINT, HF_HUB_CACHE, HF_HOME and HF_HUB_OFFLINE; arguments come first."""
    env = os.environ if environ is None else environ
    home = env.get("HF_HOME") or os.path.join(env.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")  # noqa: PTH118
    cache = cache_dir or env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    offline = env.get("HF_HUB_OFFLINE") or env.get("TRANSFORMERS_OFFLINE") or ""
    return HubSettings(
        endpoint=(env.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/"),
        cache_dir=Path(os.path.expandvars(cache)).expanduser().absolute(),
        token=token,
        offline=offline.upper() in ("1", "ON", "YES", "TRUE"),
    )


def split_hub_id(source: str, revision: str | None = None) -> tuple[str, str]:
    """``org/name`` or ``org/name@revision`` as (repository, revision).

    Raises:
        UsageError: not a repository id, or a revision that is given twice and differs.
    """
    repo, _, named = source.partition("@")
    if not _REPO.fullmatch(repo):
        raise UsageError(
            f"{source!r} is not a Hub repository", accepted="org/name or org/name@revision", where="source"
        )
    if named and revision and named != revision:
        raise UsageError(f"two revisions are given: {named!r} in the name and {revision!r}", where=source)
    wanted = named or revision or DEFAULT_REVISION
    if not _REVISION.fullmatch(wanted):
        raise UsageError(
            f"{wanted!r} is not a revision", accepted="a branch, a tag or a commit hash", where=source
        )
    return repo, wanted


def is_hub_id(source: str) -> bool:
    """Whether a string has the form ``org/name`` or ``org/name@revision``; says nothing of its existence."""
    return _REPO.fullmatch(source.partition("@")[0]) is not None
