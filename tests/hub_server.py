"""A small Hub on loopback: real HTTP, ranges, redirects to a second host, and faults on request.

It speaks the part of the Hub's interface that huggingface_hub and ``quantkit.checkpoint.hub`` use: model info,
paginated file trees, ``resolve`` with the Hub's headers, and a "CDN" under another host name and port that must
never see a token. Every request is recorded, so that tests can state how many bytes of a file were served.

Data sets are repositories named ``datasets/org/name`` (``add``).

Left out: Xet, uploads, spaces, TLS. The git and LFS ids are computed from the bytes for files up to 64 MiB;
above that (sparse copies of real models) the LFS id is made from name and size: hashing holes proves nothing.

    with HubServer(root) as hub:              # root/org/name/* is the repository org/name
        hub.fault("model-1.safetensors", "drop", after=1000, times=2)
        subprocess.run([...], env=os.environ | hub.env(cache))
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from urllib.parse import parse_qs, quote, unquote, urlsplit

CHUNK = 64 << 10
HASHED_LIMIT = 64 << 20


@dataclass
class Fault:
    """What goes wrong with the body of matching files, the first ``times`` times.

    Kinds: ``drop`` (close after ``after`` bytes), ``reset`` (the same with a TCP reset), ``status`` (answer
    ``status``, asking for a wait by a Retry-After of ``retry_after`` or a RateLimit of ``rate_limit`` seconds),
    ``ignore_range`` (200 and the whole file), ``wrong_range`` (a Content-Range that starts one byte late),
    ``wrong_total`` (a Content-Range with another file size), ``short`` (claims and sends ``after`` bytes less),
    ``slow`` (sleep ``delay`` seconds first), ``stall`` (send ``after`` bytes, then nothing for ``delay`` seconds,
    then close).
    ``where`` is "body" (the CDN for LFS files, ``resolve`` for others), "hub" (``resolve``, before a redirect) or
    "api"; for "api" the pattern is matched against the repository name.
    """

    pattern: str
    kind: str
    times: int = 1
    after: int = 0
    status: int = 503
    retry_after: float | None = None
    rate_limit: int | None = None
    delay: float = 0.0
    where: str = "body"


@dataclass
class Served:
    """One request as the server saw it; ``sent`` counts body bytes written."""

    place: str  # "api", "hub" or "cdn"
    method: str
    path: str
    file: str
    range: str | None
    token: str | None
    status: int = 0
    sent: int = 0


@dataclass
class Revision:
    """One commit: its files by name, with git or LFS id."""

    commit: str
    files: dict[str, Path]
    ids: dict[str, tuple[str, bool]] = field(default_factory=dict)  # name -> (etag, is_lfs)


@dataclass
class Repo:
    """Commits by hash, and branches or tags that point at them."""

    commits: dict[str, Revision] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def find(self, revision: str) -> Revision | None:
        return self.commits.get(self.refs.get(revision, revision))


def _ids(path: Path, name: str) -> tuple[str, bool]:
    """The ETag of a file and whether it is kept in LFS (safetensors and anything over 1 MiB)."""
    size = path.stat().st_size
    if name.endswith(".safetensors") or size > 1 << 20:
        data = path.read_bytes() if size <= HASHED_LIMIT else f"{name}:{size}".encode()
        return hashlib.sha256(data).hexdigest(), True
    return hashlib.sha1(f"blob {size}\0".encode() + path.read_bytes()).hexdigest(), False


class HubServer:
    """The server; use it as a context manager.

    Args:
        root: folder with ``org/name/`` repositories, each served as branch ``main``; None to use ``add`` only.
        token: when given, requests to the Hub need it ("Bearer token"), else 401 RepoNotFound as the real one.
        page_size: files per page of the tree listing.
        max_requests: after so many requests everything answers 500, so that a retry loop ends.
    """

    def __init__(
        self, root: Path | str | None = None, *, token: str | None = None, page_size: int = 1000,
        max_requests: int = 20_000,
    ) -> None:  # fmt: skip
        self.repos: dict[str, Repo] = {}
        self.gated: set[str] = set()
        self.token = token
        self.page_size, self.max_requests = page_size, max_requests
        self.requests: list[Served] = []
        self.faults: list[Fault] = []
        self.lock = threading.Lock()
        self._servers: list[_Server] = []
        self.endpoint = self.cdn = ""
        if root is not None:
            for folder in sorted(Path(root).glob("*/*")):
                if folder.is_dir():
                    self.add(f"{folder.parent.name}/{folder.name}", folder)

    def add(self, repo: str, folder: Path | str, *, ref: str = "main") -> str:
        """Serve ``folder`` as a new commit of ``repo`` and let ``ref`` point at it; returns the commit hash."""
        files = {str(p.relative_to(folder)): p for p in sorted(Path(folder).rglob("*")) if p.is_file()}
        ids = {name: _ids(path, name) for name, path in files.items()}
        commit = hashlib.sha1(json.dumps([repo, sorted(ids.items())]).encode()).hexdigest()
        entry = self.repos.setdefault(repo, Repo())
        entry.commits[commit] = Revision(commit, files, ids)
        entry.refs[ref] = commit
        return commit

    def fault(self, pattern: str, kind: str, **options: object) -> Fault:
        """Arrange a fault for files that match the glob ``pattern`` (see Fault)."""
        fault = Fault(pattern, kind, **options)  # type: ignore[arg-type]
        with self.lock:
            self.faults.append(fault)
        return fault

    def take_fault(self, where: str, name: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.where == where and fault.times > 0 and fnmatch.fnmatch(name, fault.pattern):
                    fault.times -= 1
                    return fault
        return None

    def served_bytes(self, pattern: str = "*") -> int:
        """Body bytes of files matching ``pattern`` that were written to sockets."""
        return sum(r.sent for r in self.requests if r.file and fnmatch.fnmatch(r.file, pattern))

    def seen(self, place: str | None = None, file: str = "*") -> list[Served]:
        """Recorded requests, optionally of one place ("api", "hub", "cdn") and of matching files."""
        wanted = [r for r in self.requests if place in (None, r.place)]
        return wanted if file == "*" else [r for r in wanted if fnmatch.fnmatch(r.file, file)]

    def env(self, home: Path | str, *, offline: bool = False) -> dict[str, str]:
        """Environment that sends huggingface_hub (and quantkit) here, with its cache under ``home``."""
        env = {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(Path(home) / "hub"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_OFFLINE": "1" if offline else "0",
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
        }
        return env | ({"HF_TOKEN": self.token} if self.token else {})

    def __enter__(self) -> HubServer:
        for place in ("hub", "cdn"):
            handler = type("Handler", (_Handler,), {"hub": self, "place": place})
            server = _Server(("127.0.0.1", 0), handler)
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
            self._servers.append(server)
        self.endpoint = f"http://127.0.0.1:{self._servers[0].server_address[1]}"
        self.cdn = f"http://localhost:{self._servers[1].server_address[1]}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop listening and end open connections; later ones are refused."""
        for server in self._servers:
            server.shutdown()
            server.hang_up()
            server.server_close()
        self._servers.clear()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.open_sockets: set[socket.socket] = set()
        super().__init__(address, handler)

    def process_request(self, request: object, client_address: object) -> None:
        assert isinstance(request, socket.socket)
        self.open_sockets.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: object) -> None:
        assert isinstance(request, socket.socket)
        self.open_sockets.discard(request)
        super().shutdown_request(request)

    def hang_up(self) -> None:
        """End connections that clients keep alive."""
        for request in list(self.open_sockets):
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are part of the tests; nothing to print."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30
    disable_nagle_algorithm = True  # else each answer waits 40 ms for the client's delayed acknowledgement
    hub: HubServer
    place: str

    def log_message(self, format: str, *args: object) -> None:
        """Requests are recorded, not printed."""

    def do_GET(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def _serve(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        place = "api" if path.startswith("/api/") else self.place
        token = self.headers.get("Authorization")
        self.record = Served(place, self.command, path, "", self.headers.get("Range"), token)
        with self.hub.lock:
            self.hub.requests.append(self.record)
            over = len(self.hub.requests) > self.hub.max_requests
        if over:
            self._answer(500, b"too many requests for this test server")
        elif place == "api":
            self._api(path, parse_qs(url.query))
        elif place == "cdn":
            self._cdn(path)
        else:
            self._resolve(url.path)

    def _answer(self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        self.record.status = status
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _error(self, status: int, code: str, message: str) -> None:
        self._answer(status, message.encode(), {"X-Error-Code": code, "X-Error-Message": message})

    def _fail(self, fault: Fault | None) -> bool:
        """Answer with the fault's status, if it has one; True when answered."""
        if fault is None:
            return False
        if fault.kind == "slow":
            time.sleep(fault.delay)
        if fault.kind != "status":
            return False
        wait = {} if fault.retry_after is None else {"Retry-After": f"{fault.retry_after:g}"}
        if fault.rate_limit is not None:
            wait["RateLimit"] = f'"resolvers";r=0;t={fault.rate_limit}'
        self._answer(fault.status, b"fault", wait)
        return True

    def _revision(self, repo: str, revision: str) -> Revision | None:
        """The commit asked for, or None after answering with the Hub's error."""
        hub = self.hub
        entry = hub.repos.get(repo)
        if entry is None or (hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}"):
            self._error(401, "RepoNotFound", "Repository not found")
            return None
        found = entry.find(revision)
        if found is None:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return found

    def _api(self, path: str, query: dict[str, list[str]]) -> None:
        match = re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/(.+?))?/?", path)
        if match is None:
            self._error(404, "NotFound", path)
            return
        repo = match.group(2) if match.group(1) == "models" else f"datasets/{match.group(2)}"
        kind, revision = match.group(3) or "revision", match.group(4) or "main"
        if self._fail(self.hub.take_fault("api", repo)):
            return
        found = self._revision(repo, revision)
        if found is None:
            return
        if kind == "revision":
            info = {
                "id": repo.removeprefix("datasets/"), "modelId": repo, "sha": found.commit, "private": False,
                "gated": "manual" if repo in self.hub.gated else False,
                "siblings": [self._sibling(found, name) for name in found.files],
            }  # fmt: skip
            self._json(info)
            return
        start = int(query.get("cursor", ["0"])[0])
        names = list(found.files)
        headers = {}
        if start + self.hub.page_size < len(names):
            there = f"{self.hub.endpoint}/api/models/{repo}/tree/{revision}?recursive=True"
            headers["Link"] = f'<{there}&cursor={start + self.hub.page_size}>; rel="next"'
        self._json([self._entry(found, name) for name in names[start : start + self.hub.page_size]], headers)

    def _entry(self, found: Revision, name: str) -> dict[str, object]:
        etag, is_lfs = found.ids[name]
        size = found.files[name].stat().st_size
        if not is_lfs:
            return {"type": "file", "path": name, "size": size, "oid": etag}
        pointer = hashlib.sha1(etag.encode()).hexdigest()
        lfs = {"oid": etag, "size": size, "pointerSize": 134}
        return {"type": "file", "path": name, "size": size, "oid": pointer, "lfs": lfs}

    def _sibling(self, found: Revision, name: str) -> dict[str, object]:
        """The same as ``_entry`` in the spelling of model info."""
        entry = self._entry(found, name)
        item = {"rfilename": name, "size": entry["size"], "blobId": entry["oid"]}
        lfs = entry.get("lfs")
        if isinstance(lfs, dict):
            item["lfs"] = {"sha256": lfs["oid"], "size": lfs["size"], "pointerSize": lfs["pointerSize"]}
        return item

    def _json(self, value: object, headers: Mapping[str, str] | None = None) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _resolve(self, raw_path: str) -> None:
        match = re.fullmatch(r"/((?:datasets/)?[^/]+/[^/]+)/resolve/([^/]+)/(.+)", raw_path)
        if match is None:
            self._error(404, "NotFound", raw_path)
            return
        repo, revision, name = (unquote(part) for part in match.groups())
        self.record.file = name
        if self._fail(self.hub.take_fault("hub", name)):
            return
        found = self._revision(repo, revision)
        if found is None:
            return
        if repo in self.hub.gated:
            self._error(403, "GatedRepo", "Access to this model is restricted")
        elif name not in found.files:
            self._error(404, "EntryNotFound", "Entry not found")
        else:
            etag, is_lfs = found.ids[name]
            headers = {"X-Repo-Commit": found.commit, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
            if not is_lfs:
                self._body(found.files[name], name, headers)
                return
            size = found.files[name].stat().st_size
            there = f"{self.hub.cdn}/{found.commit}/{quote(repo, safe='')}/{quote(name, safe='')}?signature=1"
            linked = {"X-Linked-Size": str(size), "X-Linked-Etag": f'"{etag}"', "Location": there}
            self._answer(302, b"Found. Redirecting", headers | linked)

    def _cdn(self, path: str) -> None:
        commit, repo, name = path.removeprefix("/").split("/", 1)[0], "", ""
        for repo_name, entry in self.hub.repos.items():
            if path.startswith(f"/{commit}/{repo_name}/"):
                repo, name = repo_name, path.removeprefix(f"/{commit}/{repo_name}/")
                found = entry.commits.get(commit)
        self.record.file = name
        if not repo or found is None or name not in found.files:
            self._error(404, "NotFound", path)
        else:
            self._body(found.files[name], name, {"ETag": f'"{found.ids[name][0]}"', "Accept-Ranges": "bytes"})

    def _body(self, path: Path, name: str, headers: dict[str, str]) -> None:
        """Send the file or the range asked for, with the next fault that applies."""
        fault = self.hub.take_fault("body", name) if self.command == "GET" else None
        if self._fail(fault):
            return
        kind = fault.kind if fault else ""
        size = path.stat().st_size
        start, stop, status = 0, size, 200
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked and kind != "ignore_range":
            start, status = int(asked.group(1)), 206
            stop = min(size, int(asked.group(2)) + 1) if asked.group(2) else size
            if start >= size:
                self._answer(416, b"", {"Content-Range": f"bytes */{size}"})
                return
            told, total = (start + 1 if kind == "wrong_range" else start), (size + (kind == "wrong_total"))
            headers = headers | {"Content-Range": f"bytes {told}-{stop - 1}/{total}"}
        if fault and kind == "short":
            stop = max(start, stop - fault.after)
        self.record.status = status
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        if self.command == "GET":
            breaks = fault is not None and kind in ("drop", "reset", "stall")
            self._send(path, start, min(stop, start + fault.after) if fault and breaks else stop)
            if fault and breaks:
                time.sleep(fault.delay if kind == "stall" else 0)
                self._break(kind)

    def _send(self, path: Path, start: int, stop: int) -> None:
        with path.open("rb") as file:
            file.seek(start)
            while start < stop:
                data = file.read(min(CHUNK, stop - start))
                self.record.sent += len(data)  # before: the client may have it as soon as it is written
                self.wfile.write(data)
                start += len(data)

    def _break(self, kind: str) -> None:
        """End the connection in the middle of the body."""
        self.wfile.flush()
        if kind == "reset":
            time.sleep(0.05)  # let the bytes before the reset arrive
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        else:
            self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True
