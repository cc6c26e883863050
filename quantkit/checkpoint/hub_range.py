"""Byte ranges of files on the Hub by HTTP, resumed from the bytes already received.

This is what lets `plan` read the headers of a 700 GiB repository without downloading a shard. It works on
huggingface_hub's shared client (proxies, certificates, offline guard) and follows the redirect to the storage
host, where httpx drops the token because the origin differs.

A server may ignore Range and answer 200: then the bytes before the wanted ones are skipped, and the connection
is closed after the last wanted byte, unless that would mean to read more than ``SKIP_LIMIT`` in vain.
Left out: parallel ranges of one file; callers read several files at once instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import closing
from typing import TYPE_CHECKING

from ..errors import EnvironmentProblem, QuantkitError
from .hub_errors import BrokenTransfer, Retry, explain
from .hub_settings import HubSettings

if TYPE_CHECKING:
    import httpx

CHUNK = 1 << 20
SKIP_LIMIT = 64 << 20
PROGRESS = 64 << 10  # so many new bytes count as progress, and the count of failures starts again

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


class RangeReader:
    """Reads ranges of the files of one commit.

    Args:
        settings: endpoint and token.
        repo: ``org/name``.
        commit: the commit hash, so that all reads see the same files.
        retry: how often to try again.
    """

    def __init__(self, settings: HubSettings, repo: str, commit: str, retry: Retry) -> None:
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        self.settings, self.repo, self.commit, self.retry = settings, repo, commit, retry
        self.headers: dict[str, str] = build_hf_headers(token=settings.token, library_name="quantkit")

    def url(self, name: str) -> str:
        """Address of a file at this commit."""
        from huggingface_hub import hf_hub_url

        return hf_hub_url(self.repo, name, revision=self.commit, endpoint=self.settings.endpoint)

    def readinto(
        self, name: str, size: int, offset: int, buffer: memoryview, on_wait: Callable[[], None] | None = None
    ) -> None:
        """Fill ``buffer`` from ``offset`` of a file of ``size`` bytes."""
        at = 0

        def keep(data: bytes) -> None:
            nonlocal at
            buffer[at : at + len(data)] = data
            at += len(data)

        self.stream(name, size, offset, offset + len(buffer), keep, on_wait)

    def stream(
        self, name: str, size: int, start: int, stop: int, sink: Callable[[bytes], None],
        on_wait: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """Hand bytes ``start`` to ``stop`` of a file to ``sink``, in order, each byte once.

        Errors of ``sink``, and of ``on_wait`` (called while waiting for the next attempt), pass through unchanged.

        Raises:
            SourceError: the file is gone, not open to the user, or shorter than the listing says.
            EnvironmentProblem: the network or the server keeps failing.
        """
        at, failures = start, 0
        while at < stop:
            before = at
            chunks = self._body(name, size, at, stop)
            with closing(chunks):
                while True:
                    try:
                        data = next(chunks, None)
                        if data is None and at < stop:
                            raise BrokenTransfer(f"the connection ended {stop - at:,} bytes early")
                    except QuantkitError:
                        raise
                    except Exception as error:
                        failures = 1 if at - before >= PROGRESS else failures + 1
                        if self.retry.gives_up(failures, error):
                            raise explain(error, self.repo, self.commit, name, failures) from error
                        self.retry.pause(failures, error, on_wait)
                        break
                    if data is None:
                        break
                    sink(data)
                    at += len(data)

    def _body(self, name: str, size: int, at: int, stop: int) -> Generator[bytes, None, None]:
        """The bytes of one response, cut to ``at``..``stop``."""
        import httpx
        from huggingface_hub import constants
        from huggingface_hub.utils import get_session, hf_raise_for_status  # type: ignore[attr-defined]

        asked = {"Range": f"bytes={at}-{stop - 1}", "Accept-Encoding": "identity"}
        timeout = httpx.Timeout(constants.HF_HUB_DOWNLOAD_TIMEOUT)
        with get_session().stream(
            "GET", self.url(name), headers=self.headers | asked, timeout=timeout, follow_redirects=True
        ) as response:
            hf_raise_for_status(response)
            skip, wanted = self._check(response, name, size, at, stop), stop - at
            for chunk in response.iter_bytes():  # as they come: a larger unit would be lost with the connection
                data = chunk[skip : skip + wanted]
                skip = max(0, skip - len(chunk))
                wanted -= len(data)
                if data:
                    yield data
                if not wanted:
                    return

    def _check(self, response: httpx.Response, name: str, size: int, at: int, stop: int) -> int:
        """How many bytes of the body come before ``at``."""
        if response.status_code == 206:
            found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if found is None or int(found[1]) != at or int(found[2]) >= stop:
                told = response.headers.get("Content-Range", "no Content-Range")
                raise BrokenTransfer(f"bytes {at:,} to {stop - 1:,} were asked for, the server sent {told!r}")
            if found[3] not in ("*", str(size)):
                raise BrokenTransfer(f"the server's file has {found[3]} bytes, the Hub's listing says {size}")
            return 0
        length = response.headers.get("Content-Length")
        if length is not None and "Content-Encoding" not in response.headers and int(length) != size:
            raise BrokenTransfer(f"the server's file has {length} bytes, the Hub's listing says {size}")
        if at > SKIP_LIMIT:
            raise EnvironmentProblem(
                f"the server does not serve byte ranges, and byte {at:,} is too far to read up to",
                where=f"{self.repo}@{self.commit}/{name}",
                hint=f"Download the file first: hf download {self.repo} {name} --revision {self.commit}",
            )
        return at
