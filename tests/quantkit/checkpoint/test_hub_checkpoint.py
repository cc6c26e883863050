"""A checkpoint opened from a Hub: the same as from disk, at the price of its headers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from quantkit.checkpoint import open_checkpoint
from quantkit.errors import SourceError, UsageError
from tests.hub_server import HubServer
from tests.quantkit.checkpoint.hub_case import MIB, SHARD_BYTES, cached

NAME = "acme/tiny-glm"
TINY = Path(str(files("quantkit.data"))) / "models" / "tiny-glm-5.2-fp8"


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer(max_requests=2000) as hub:
        hub.add(NAME, TINY)
        for key, value in hub.env(tmp_path / "hf").items():
            monkeypatch.setenv(key, value)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        yield hub


def test_the_headers_are_all_that_is_served(tiny: HubServer) -> None:
    with open_checkpoint(NAME) as hub, open_checkpoint(TINY) as local:
        assert hub.kind == "hub" and hub.revision == tiny.repos[NAME].refs["main"]
        assert list(hub.tensors.values()) == list(local.tensors.values())
        assert hub.config == local.config and hub.weights().keys() == local.weights().keys()
        assert {n: f.header_sha256 for n, f in hub.files.items()} == {
            n: f.header_sha256 for n, f in local.files.items()
        }
        headers = sum(max(f.data_start, 128 * 1024) for f in local.files.values())
        assert 0 < tiny.served_bytes("*.safetensors") <= headers
        assert len(tiny.seen("cdn", "*.safetensors")) <= 2 * len(local.files)


def test_single_tensors_are_read_without_a_download(tiny: HubServer) -> None:
    with open_checkpoint(NAME) as hub, open_checkpoint(TINY) as local:
        opened = tiny.served_bytes("*.safetensors")
        names = list(local.tensors)[::97]
        for name in names:
            np.testing.assert_array_equal(hub.array(name), local.array(name))
        assert tiny.served_bytes("*.safetensors") - opened == sum(local.tensors[n].nbytes for n in names)


def test_the_fingerprint_is_the_same_online_and_offline(tiny: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_checkpoint(NAME) as hub:
        online = hub.fingerprint
        for name in hub.files:
            hub.fetch(name)
        hub.side_bytes("config.json")
        hub.side_bytes("model.safetensors.index.json")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = len(tiny.requests)
    with open_checkpoint(NAME) as hub:
        assert hub.fingerprint == online
    assert len(tiny.requests) == before


def test_a_revision_is_named_with_an_at_sign(tiny: HubServer) -> None:
    commit = tiny.repos[NAME].refs["main"]
    with open_checkpoint(f"{NAME}@{commit}") as hub:
        assert hub.revision == commit
    with pytest.raises(UsageError, match="two revisions"):
        open_checkpoint(f"{NAME}@{commit}", revision="main")
    with pytest.raises(SourceError, match="no such revision"):
        open_checkpoint(f"{NAME}@v9")


def test_consume_deletes_the_hub_copy_and_nothing_local(tiny: HubServer, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(TINY, copy)
    with open_checkpoint(copy) as local, pytest.raises(UsageError):
        local.consume(next(iter(local.files)))
    with open_checkpoint(NAME) as hub:
        name = next(iter(hub.files))
        path = hub.fetch(name)
        hub.consume(name)
        assert not path.exists()
        assert (copy / name).exists()


def test_a_download_resumes_after_kill(hub: HubServer, tmp_path: Path) -> None:
    code = "import sys; from quantkit.checkpoint.hub import HubStore; HubStore('acme/moe').fetch(sys.argv[1])"
    shard = "model-00001-of-00002.safetensors"
    fault = hub.fault(shard, "stall", after=5 * MIB, delay=20)
    child = subprocess.Popen([sys.executable, "-c", code, shard], env=os.environ | hub.env(tmp_path / "hf"))
    try:
        parts: list[Path] = []
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline and not (parts and parts[0].stat().st_size >= 4 * MIB):
            parts = list((cached(tmp_path) / "blobs").glob("*.incomplete"))
            time.sleep(0.02)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert fault.times == 0 and parts and parts[0].stat().st_size >= 4 * MIB
    kept = parts[0].stat().st_size
    served = hub.served_bytes(shard)
    subprocess.run([sys.executable, "-c", code, shard], env=os.environ | hub.env(tmp_path / "hf"), check=True)
    assert hub.served_bytes(shard) - served == len(SHARD_BYTES) - kept
    [snapshot] = (cached(tmp_path) / "snapshots").iterdir()
    assert (snapshot / shard).read_bytes() == SHARD_BYTES
