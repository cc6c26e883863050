"""Fixtures of the checkpoint tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub_server import HubServer
from tests.quantkit.checkpoint.hub_case import (
    CONFIG,
    INDEX,
    INDEX_NAME,
    OTHER,
    OTHER_BYTES,
    REPO,
    SHARD,
    SHARD_BYTES,
)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "repos" / REPO
    folder.mkdir(parents=True)
    (folder / SHARD).write_bytes(SHARD_BYTES)
    (folder / OTHER).write_bytes(OTHER_BYTES)
    (folder / "config.json").write_bytes(CONFIG)
    (folder / INDEX_NAME).write_bytes(INDEX)
    (folder / ".gitattributes").write_bytes(b"*.safetensors filter=lfs")
    return folder


@pytest.fixture
def hub(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer(repo.parent.parent, max_requests=500) as server:
        for key, value in server.env(tmp_path / "hf").items():
            monkeypatch.setenv(key, value)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        yield server
