"""Failures of huggingface_hub and of the network as one sentence of ours, and which of them may pass.

The line between the exit codes: what the user named does not exist or is not open to them is the source's
problem (3); network, server trouble and disk are the machine's (4). Messages never contain the URL, which on a
CDN carries a signature.
"""

from __future__ import annotations

import errno
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ..errors import EnvironmentProblem, QuantkitError, SourceError

T = TypeVar("T")

_TRANSIENT_STATUS = frozenset((408, 425, 429, 500, 502, 503, 504))
_RATE_LIMIT = re.compile(r";\s*r=0\s*;\s*t=(\d+)")
_SLICE_S = 0.2  # of a wait, so that Ctrl-C and other threads' errors are noticed
_NO_SPACE = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


class BrokenTransfer(Exception):
    """The server's answer does not fit the request (wrong range, fewer bytes than announced); worth a retry."""


@dataclass(frozen=True, slots=True)
class Retry:
    """How often and how long to try again.

    Attributes:
        attempts: failures in a row, without new bytes between them, until the error stands.
        first_wait_s: pause after the first failure; doubles each time.
        longest_wait_s: upper bound of that pause.
        longest_asked_s: longest Retry-After that is waited for; the Hub counts in windows of 300 s.
    """

    attempts: int = 5
    first_wait_s: float = 0.5
    longest_wait_s: float = 8.0
    longest_asked_s: float = 300.0

    def pause(self, failures: int, error: BaseException, on_wait: Callable[[], None] | None = None) -> None:
        """Wait before the next attempt: as long as the server asks, else exponentially with jitter.

        ``on_wait`` is called several times a second; it may raise to end the wait.
        """
        wait = min(self.longest_wait_s, self.first_wait_s * 2 ** (failures - 1))
        asked = _retry_after(error)
        end = time.monotonic() + (wait * random.uniform(0.75, 1.25) if asked is None else asked)
        while (left := end - time.monotonic()) > 0:
            if on_wait is not None:
                on_wait()
            time.sleep(min(left, _SLICE_S))

    def gives_up(self, failures: int, error: BaseException) -> bool:
        """Whether the error stands now."""
        asked = _retry_after(error) or 0.0
        return failures >= self.attempts or asked > self.longest_asked_s or not is_transient(error)

    def call(
        self, action: Callable[[], T], repo: str, revision: str, file: str | None = None, *,
        on_wait: Callable[[], None] | None = None,
    ) -> T:  # fmt: skip
        """Run ``action`` until it succeeds; its last error is translated by ``explain``."""
        failures = 0
        while True:
            try:
                return action()
            except QuantkitError:
                raise
            except Exception as error:
                failures += 1
                if self.gives_up(failures, error):
                    raise explain(error, repo, revision, file, failures) from error
                self.pause(failures, error, on_wait)


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed a moment later."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return error.response is not None and error.response.status_code in _TRANSIENT_STATUS
    if isinstance(error, httpx.ProxyError | httpx.UnsupportedProtocol):
        return False
    # huggingface_hub closes the client that all threads share after a failed connection.
    closed = isinstance(error, RuntimeError) and "client has been closed" in str(error)
    return closed or isinstance(error, BrokenTransfer | httpx.TransportError)


def explain(
    error: BaseException, repo: str, revision: str, file: str | None = None, failures: int = 1
) -> QuantkitError:
    """The error of ours that says what happened to ``file`` (or to the listing) of a repository."""
    import httpx
    from huggingface_hub import errors as hub

    where = f"{repo}@{revision}" + (f"/{file}" if file else "")
    times = f" ({failures} attempts)" if failures > 1 else ""
    if isinstance(error, QuantkitError):
        return error
    if isinstance(error, hub.OfflineModeIsEnabled):
        return missing_offline(repo, revision, [file] if file else [])
    if isinstance(error, hub.HfHubHTTPError):
        return _http_problem(error, repo, where, times)
    if isinstance(error, BrokenTransfer):
        return EnvironmentProblem(f"{error}{times}", where=where, hint="Try again later, or use another endpoint.")
    if isinstance(error, hub.FileMetadataError | hub.LocalEntryNotFoundError | httpx.HTTPError):
        return EnvironmentProblem(
            f"the Hub cannot be reached{times}: {_first_line(error)}",
            where=where,
            hint="Check the network, proxy settings and HF_ENDPOINT.",
        )
    if isinstance(error, OSError):
        return disk_problem(error, where)
    return EnvironmentProblem(f"cannot be read from the Hub{times}: {_first_line(error)}", where=where)


def disk_problem(error: OSError, where: str) -> EnvironmentProblem:
    """Why a file cannot be written to the cache."""
    if error.errno in _NO_SPACE:
        return EnvironmentProblem(
            f"no space left on the disk while downloading ({error.filename or 'Hub cache'})",
            where=where,
            hint="Free space and run again: the download resumes. HF_HUB_CACHE moves the cache to another disk.",
        )
    reason = error.strerror or _first_line(error)
    place = f" ({error.filename})" if error.filename else ""
    return EnvironmentProblem(f"the download cannot be stored: {reason}{place}", where=where)


def missing_offline(repo: str, revision: str, files: list[str]) -> EnvironmentProblem:
    """Files that are needed and not in the cache, while the network may not be used."""
    named = ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
    what = f"{named} not in the local cache" if files else "not in the local cache"
    pinned = "" if revision == "main" else f" --revision {revision}"
    wanted = "".join(f" {file}" for file in files[:3]) if len(files) <= 3 else ""
    name = repo.removeprefix("datasets/")
    kind = " --repo-type dataset" if name != repo else ""
    return EnvironmentProblem(
        f"{what}, and HF_HUB_OFFLINE forbids the network",
        where=f"{repo}@{revision}",
        hint=f"Unset HF_HUB_OFFLINE, or get it first: hf download {name}{wanted}{pinned}{kind}",
    )


def _http_problem(error: BaseException, repo: str, where: str, times: str) -> QuantkitError:
    from huggingface_hub import errors as hub

    login = "`hf auth login` or HF_TOKEN"
    if isinstance(error, hub.GatedRepoError):
        return SourceError(
            "the repository is gated, and access is not granted to this token",
            where=where,
            hint=f"Accept its terms at https://huggingface.co/{repo}, then log in ({login}).",
        )
    if isinstance(error, hub.RepositoryNotFoundError):
        return SourceError(
            "no such repository on the Hub, or it is private",
            where=where,
            hint=f"Check the spelling; for a private repository log in ({login}).",
        )
    if isinstance(error, hub.RevisionNotFoundError):
        return SourceError(
            "the repository has no such revision", where=where, accepted="a branch, a tag or a commit hash"
        )
    if isinstance(error, hub.RemoteEntryNotFoundError):
        return SourceError("the repository has no such file", where=where)
    status = getattr(getattr(error, "response", None), "status_code", 0)
    if status in (401, 403) or isinstance(error, hub.DisabledRepoError):
        return SourceError(f"access is refused (HTTP {status})", where=where, hint=f"Check the token: {login}.")
    if status == 404:
        return SourceError("not found (HTTP 404)", where=where)
    if status == 416:
        return SourceError("the file is shorter than the Hub's listing says", where=where)
    if status == 429:
        return EnvironmentProblem(
            f"the Hub limits the rate of requests (HTTP 429){times}",
            where=where,
            hint=f"Wait some minutes, or log in for a higher limit ({login}).",
        )
    return EnvironmentProblem(
        f"the Hub answers HTTP {status}{times}", where=where, hint="Try again later; what is downloaded is kept."
    )


def _retry_after(error: BaseException) -> float | None:
    response = getattr(error, "response", None)
    if response is None:
        return None
    value = response.headers.get("Retry-After", "").strip()
    if value.isdigit():
        return float(value)
    # The Hub's own form: ratelimit: "resolvers";r=0;t=55 (nothing remains, the window ends in 55 s)
    limit = _RATE_LIMIT.search(response.headers.get("RateLimit", ""))
    return float(limit[1]) if limit and response.status_code == 429 else None


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].split("http://")[0].split("https://")[0].strip(" :'") or type(error).__name__
