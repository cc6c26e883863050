"""Conversion straight from a Hub (a small one on loopback): hard links, consume, damaged downloads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from quantkit.artifact import Artifact, verify_artifact
from quantkit.convert import Progress
from quantkit.convert import sources as sources_module
from quantkit.errors import SourceError, UsageError
from tests.builders import write_moe
from tests.hub_server import HubServer
from tests.quantkit.convert.cases import core_digests, run

NAME = "acme/moe"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    write_moe(tmp_path / "repos" / NAME, "glm_moe_dsa", shards=4)
    with HubServer(tmp_path / "repos") as server:
        for key, value in server.env(tmp_path / "hf").items():
            monkeypatch.setenv(key, value)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        yield server


def blobs(tmp_path: Path) -> list[Path]:
    """Weight files in the cache."""
    snapshots = tmp_path.rglob("snapshots/*/*.safetensors")
    return [path.resolve() for path in snapshots if path.exists()]


def test_hub_source_is_hard_linked(hub: HubServer, tmp_path: Path) -> None:
    artifact = run(NAME, tmp_path / "out")
    source = artifact.manifest.source
    assert (source.kind, source.label) == ("hub", NAME) and source.revision
    assert len(blobs(tmp_path)) == 4
    assert all(blob.stat().st_nlink == 2 for blob in blobs(tmp_path))
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
    report = verify_artifact(tmp_path / "out", against=tmp_path / "repos" / NAME)
    assert report.ok, report.problems
    assert "base_model_relation: quantized" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("mode", ["auto", "copy"])
def test_consume_leaves_one_copy(hub: HubServer, tmp_path: Path, mode: str) -> None:
    most = 0

    def watch(event: Progress) -> None:
        nonlocal most
        most = max(most, len(blobs(tmp_path)))

    run(NAME, tmp_path / "out", consume=True, place=mode, jobs=1, on_progress=watch)
    assert not blobs(tmp_path) and 1 <= most < 4  # shards came and went one after the other
    run(NAME, tmp_path / "kept")
    assert core_digests(tmp_path / "out") == core_digests(tmp_path / "kept")
    assert verify_artifact(tmp_path / "out").ok


def test_consume_and_reference_exclude_each_other(hub: HubServer, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="only copy"):
        run(NAME, tmp_path / "out", consume=True, place="reference")


@pytest.mark.parametrize("events", [3, 12, 30, 45])
def test_consume_resumes_without_fetching_twice(hub: HubServer, tmp_path: Path, events: int) -> None:
    left = events

    def stop(event: Progress) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        run(NAME, tmp_path / "out", consume=True, jobs=1, on_progress=stop)
    run(NAME, tmp_path / "out", consume=True)
    shutil.rmtree(tmp_path / "hf")
    served = {path.name: hub.served_bytes(path.name) for path in (tmp_path / "repos" / NAME).glob("*.safetensors")}
    run(NAME, tmp_path / "whole")
    assert core_digests(tmp_path / "out") == core_digests(tmp_path / "whole")
    for name, nbytes in served.items():  # once as a whole, and 256 KiB for the header
        size = (tmp_path / "repos" / NAME / name).stat().st_size
        assert nbytes < 2 * size, name


def test_digest_that_the_hub_does_not_state(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A download that arrives whole and wrong: the etag is the file's sha256."""
    real = sources_module.place_file

    def damaged(source: Path, *args: object) -> object:
        with open(source.resolve(), "r+b") as handle:
            handle.seek(-1, 2)
            last = handle.read(1)
            handle.seek(-1, 2)
            handle.write(bytes([last[0] ^ 1]))
        return real(source, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(sources_module, "place_file", damaged)
    with pytest.raises(SourceError, match="the hub states"):
        run(NAME, tmp_path / "out", place="copy", jobs=1)
    assert not (tmp_path / "out").exists()


def test_consume_deletes_nothing_that_does_not_read_back(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources_module, "place_is_intact", lambda path, sha256: False)
    with pytest.raises(Exception, match="nothing was deleted"):
        run(NAME, tmp_path / "out", consume=True, place="copy", jobs=1)
    assert blobs(tmp_path)


def test_reference_to_a_hub_repository(hub: HubServer, tmp_path: Path) -> None:
    run(NAME, tmp_path / "out", place="reference")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["source"]["label"] == NAME and manifest["source"]["revision"]
    assert manifest["views"]["prefill"]["stored"] == "reference"
    with Artifact.open(tmp_path / "out") as artifact, pytest.raises(Exception, match="reference"):
        artifact.prefill.tensors  # noqa: B018
    assert verify_artifact(tmp_path / "out", against=tmp_path / "repos" / NAME).ok
