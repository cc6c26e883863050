"""A repository on a loopback Hub and the command line beside it: what the Hub tests of conversion share."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from quantkit.cli.main import main
from tests.hub_server import Fault, HubServer, Served
from tests.quantkit.convert.cases import core_digests

NAME = "acme/moe"
HEADER = "bytes=0-131071"  # the request that reads a shard's header; shards of these tests are larger
TOKEN = "hf_NeverToBeSeen"


def same_core(out: Path, local: dict[str, str]) -> bool:
    """Whether an artifact has these core digests; manifest.json is left out, since it names the source."""
    return {name: sha256 for name, sha256 in core_digests(out).items() if name != "manifest.json"} == local


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """The one error line; fails when there is none, more than one, or anything that must not be shown."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        for never in ("Traceback", "signature", TOKEN, "http://"):
            assert never not in self.err + self.out
        return lines[0]


def document(result: Result) -> Any:
    """What ``--json`` printed."""
    return json.loads(result.out)


class HubCase:
    """One test's Hub, cache and program.

    Attributes:
        hub: the server. source: the folder that it serves. home: HF_HOME. shards: names of weight files, in order.
    """

    def __init__(self, hub: HubServer, source: Path, home: Path, read: Callable[[], tuple[str, str]]) -> None:
        self.hub, self.source, self.home, self._read = hub, source, home, read
        self.shards = sorted(path.name for path in source.glob("*.safetensors"))
        self.sizes = {name: (source / name).stat().st_size for name in self.shards}

    def run(self, *arguments: str | Path) -> Result:
        """One command line in this process."""
        self._read()
        return Result(main([str(a) for a in arguments]), *self._read())

    @staticmethod
    def command(out: Path, repo: str = NAME) -> tuple[str, ...]:
        """The conversion that ``local_digests`` belongs to, by one worker."""
        return ("convert", repo, "--w4", "--method", "rtn", "-j", "1", "-o", str(out))

    def convert(self, out: Path, *options: str | Path) -> Result:
        return self.run(*self.command(out), *options)

    def bodies(self, since: int = 0, repo: str = NAME) -> list[Served]:
        """Requests for weights beyond headers, from request number ``since`` on."""
        return [
            r
            for r in self.hub.requests[since:]
            if r.place == "cdn" and r.file in self.shards and r.range != HEADER and f"/{repo}/" in r.path
        ]

    def asked(self, since: int = 0, repo: str = NAME) -> list[str]:
        """Names of the shards whose weights were asked for."""
        return [r.file for r in self.bodies(since, repo)]

    def cached(self, repo: str = NAME) -> dict[str, Path]:
        """Complete weight files in the cache: name to blob."""
        folder = self.home / "hub" / f"models--{repo.replace('/', '--')}"
        return {p.name: p.resolve() for p in folder.glob("snapshots/*/*.safetensors") if p.exists()}

    def cache_bytes(self) -> int:
        """Bytes of weights in the cache now, partial downloads included."""
        total = 0
        for path in self.home.rglob("blobs/*"):
            try:
                total += path.stat().st_size if path.stat().st_size > 100_000 or "incomplete" in path.name else 0
            except FileNotFoundError:  # consumed between the listing and here
                continue
        return total

    def at_body(self, hook: Callable[[str], None]) -> None:
        """Call ``hook`` with the file's name whenever the server is about to send weights."""
        real = self.hub.take_fault

        def spy(where: str, name: str) -> Fault | None:
            if where == "body" and self.asked()[-1:] == [name]:
                hook(name)
            return real(where, name)

        self.hub.take_fault = spy  # type: ignore[method-assign]


class Watcher:
    """Samples a figure in a thread and keeps the largest."""

    def __init__(self, figure: Callable[[], int]) -> None:
        self.most, self._figure, self._done = 0, figure, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def look(self) -> None:
        self.most = max(self.most, self._figure())

    def _watch(self) -> None:
        while not self._done.is_set():
            self.look()
            time.sleep(0.002)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
