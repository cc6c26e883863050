"""The local store: exact ranges, bounded descriptors, many threads, links."""

from __future__ import annotations

import errno
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quantkit.checkpoint.local import LocalStore
from quantkit.checkpoint.store import FileStore
from quantkit.errors import EnvironmentProblem, SourceError, UsageError


def fill(folder: Path, count: int, size: int = 5000) -> dict[str, bytes]:
    content = {f"file-{k:03d}": random.Random(k).randbytes(size) for k in range(count)}
    for name, data in content.items():
        (folder / name).write_bytes(data)
    return content


def descriptors(folder: Path) -> int:
    links = (os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir())
    return sum(link.startswith(str(folder.resolve())) for link in links)


def test_is_a_file_store(tmp_path: Path) -> None:
    assert isinstance(LocalStore(tmp_path), FileStore)


def test_ranges(tmp_path: Path) -> None:
    content = fill(tmp_path, 1)["file-000"]
    store = LocalStore(tmp_path)
    assert store.names() == {"file-000": 5000}
    assert store.read_at("file-000", 0, 5000) == content
    assert store.read_at("file-000", 4990, 10) == content[4990:]
    assert store.read_at("file-000", 7, 0) == b""
    buffer = bytearray(b"x" * 20)
    store.readinto("file-000", 100, memoryview(buffer)[5:15])
    assert buffer == b"x" * 5 + content[100:110] + b"x" * 5


def test_reads_from_many_threads_with_few_descriptors(tmp_path: Path) -> None:
    content = fill(tmp_path, 40)
    store = LocalStore(tmp_path, max_open=4)
    wrong: list[str] = []
    most = 0

    def work(seed: int) -> None:
        nonlocal most
        rng = random.Random(seed)
        for k in range(100):
            name = rng.choice(list(content))
            start = rng.randrange(4000)
            if store.read_at(name, start, 1000) != content[name][start : start + 1000]:
                wrong.append(name)
            if seed == 0 and k % 10 == 0:
                most = max(most, descriptors(tmp_path))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert not wrong
    assert 0 < most <= 4 + 8  # the limit plus those in use
    assert descriptors(tmp_path) <= 4 + 8
    store.close()
    assert descriptors(tmp_path) == 0
    with pytest.raises(UsageError, match="closed"):
        store.read_at("file-000", 0, 1)


def test_closing_during_reads_leaves_no_descriptor(tmp_path: Path) -> None:
    fill(tmp_path, 8)
    store = LocalStore(tmp_path, max_open=2)
    started = threading.Event()

    def work() -> None:
        for k in range(10_000):
            try:
                store.read_at(f"file-{k % 8:03d}", 0, 5000)
            except UsageError:
                return
            started.set()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    started.wait(10)
    store.close()
    for thread in threads:
        thread.join()
    assert descriptors(tmp_path) == 0


def test_file_that_shrank_is_an_error(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    store = LocalStore(tmp_path)
    (tmp_path / "file-000").write_bytes(b"short")
    with pytest.raises(SourceError, match=r"file-000.*byte 5.*truncated") as caught:
        store.read_at("file-000", 0, 100)
    assert caught.value.exit_code == 3


def test_file_that_vanished_is_an_error(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    store = LocalStore(tmp_path)
    (tmp_path / "file-000").unlink()
    with pytest.raises(SourceError, match=r"file-000"):
        store.read_at("file-000", 0, 1)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.EMFILE])
def test_permissions_and_disks_are_the_machines_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    fill(tmp_path, 1)
    store = LocalStore(tmp_path)

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(EnvironmentProblem, match=r"file-000: cannot be read") as caught:
        store.read_at("file-000", 0, 1)
    assert caught.value.exit_code == 4


def test_unknown_name_never_becomes_a_path(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    folder = tmp_path / "model"
    folder.mkdir()
    store = LocalStore(folder)
    for name in ("../secret", str(tmp_path / "secret")):
        with pytest.raises(SourceError, match="has no file"):
            store.read_at(name, 0, 1)
        with pytest.raises(SourceError, match="has no file"):
            store.fetch(name)


def test_links_to_files_are_followed_as_in_the_hub_cache(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots"
    blobs.mkdir()
    snapshot.mkdir()
    (blobs / "abc").write_bytes(b"content")
    (snapshot / "model.safetensors").symlink_to("../blobs/abc")
    store = LocalStore(snapshot)
    assert store.names() == {"model.safetensors": 7}
    assert store.read_at("model.safetensors", 0, 7) == b"content"


def test_link_that_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("../blobs/gone")
    with pytest.raises(SourceError, match=r"model.safetensors: symbolic link leads nowhere.*blobs/gone"):
        LocalStore(tmp_path)
    with pytest.raises(SourceError, match="leads nowhere"):
        LocalStore(tmp_path / "model.safetensors")


def test_hidden_files_and_linked_folders_are_left_out(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("x")
    (tmp_path / ".hidden").write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.py").write_text("x")
    os.mkfifo(tmp_path / "pipe")
    assert list(LocalStore(tmp_path).names()) == ["sub/a.py"]


def test_a_local_file_is_never_deleted(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    store = LocalStore(tmp_path)
    with pytest.raises(UsageError, match="never deletes"):
        store.consume("file-000")
    assert store.fetch("file-000").exists()
    store.drop_cache("file-000")
    assert store.etag("file-000") is None
