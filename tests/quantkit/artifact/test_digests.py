"""Digests taken in one read, or while a file is still being written, are hashlib's of the finished bytes."""

from __future__ import annotations

import hashlib
import os
import random
import threading
from itertools import pairwise
from pathlib import Path

import pytest

from quantkit.artifact.digests import FileDigests
from quantkit.artifact.prefix import PrefixDigest
from quantkit.checkpoint.tensor import TensorInfo
from quantkit.errors import SourceError
from quantkit_kernels.digest import sha256

DATA = random.Random(3).randbytes(5000)


def tensor(name: str, offset: int, nbytes: int) -> TensorInfo:
    return TensorInfo(name=name, dtype="U8", shape=(nbytes,), file="f.safetensors", offset=offset, nbytes=nbytes)


def sha(start: int, stop: int) -> str:
    return hashlib.sha256(DATA[start:stop]).hexdigest()


TENSORS = [tensor("b", 700, 1300), tensor("a", 100, 600), tensor("empty", 2000, 0), tensor("c", 2100, 2900)]


@pytest.mark.parametrize("piece", [1, 7, 64, 100, 999, 5000])
def test_file_and_tensors(piece: int) -> None:
    digests = FileDigests(TENSORS)
    for start in range(0, len(DATA), piece):
        digests.update(memoryview(DATA)[start : start + piece])
    assert digests.of_file() == sha(0, 5000)
    expected = {"a": sha(100, 700), "b": sha(700, 2000), "empty": sha(0, 0), "c": sha(2100, 5000)}
    assert digests.of_tensors() == expected


def test_a_tensor_that_the_file_does_not_hold() -> None:
    digests = FileDigests(TENSORS)
    digests.update(memoryview(DATA)[:3000])
    with pytest.raises(SourceError, match="beyond the end"):
        digests.of_tensors()


@pytest.mark.parametrize("seed", range(5))
def test_prefix_while_parts_come_in_any_order(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit.artifact.prefix._PIECE", 97)
    draw = random.Random(seed)
    cuts = sorted({0, 5000, *(draw.randrange(5000) for _ in range(30))})
    spans = {f"t{i}": span for i, span in enumerate(pairwise(cuts))}
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 5000)
    prefix = PrefixDigest(fd, [(name, end) for name, (_, end) in spans.items()])
    names, found = list(spans), {}
    draw.shuffle(names)

    def work() -> None:
        while names:
            try:
                name = names.pop()
            except IndexError:
                return
            start, end = spans[name]
            stream = sha256()
            os.pwrite(fd, DATA[start:end], start)
            prefix.update(stream, memoryview(DATA)[start:end])
            found[name] = stream.hexdigest()
            prefix.add([name])

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert prefix.finish(5000) == sha(0, 5000)
    assert found == {name: sha(*span) for name, span in spans.items()}
    os.close(fd)


def test_prefix_reads_nothing_before_it_is_final(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    prefix = PrefixDigest(fd, [("a", 1000), ("b", 5000)])
    prefix.add(["b"])
    prefix.update(sha256(), memoryview(DATA))  # nothing of the file is to be had yet
    os.pwrite(fd, DATA, 0)
    prefix.add(["a"])
    assert prefix.finish(5000) == sha(0, 5000)
    os.close(fd)


def test_prefix_of_a_file_that_is_too_short(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(DATA[:10])
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    with pytest.raises(RuntimeError, match="byte 10 of 20"):
        PrefixDigest(fd, [("a", 20)]).finish(20)
    os.close(fd)
