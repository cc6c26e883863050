"""Fixtures of the Hub tests of conversion."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders import write_moe
from tests.hub_server import HubServer
from tests.quantkit.checkpoint.hub_case import QUICK
from tests.quantkit.convert.cases import core_digests, run
from tests.quantkit.convert.hub_cases import NAME, HubCase


@pytest.fixture(scope="session")
def moe_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in eight shards of half a megabyte: layers span shards, embedding and head stand at the ends."""
    return write_moe(tmp_path_factory.mktemp("hub-source") / "moe", "glm_moe_dsa", layers=6, shards=8)


@pytest.fixture(scope="session")
def local_digests(moe_source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Core digests of the artifact made from the same files on the disk, without what names the source."""
    out = tmp_path_factory.mktemp("local") / "out"
    run(moe_source, out)
    return {name: sha256 for name, sha256 in core_digests(out).items() if name != "manifest.json"}


@pytest.fixture
def case(
    moe_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[HubCase]:
    """The model on a Hub, an empty cache, and retries that don't wait."""
    with HubServer() as hub:
        hub.add(NAME, moe_source)
        for key, value in hub.env(tmp_path / "hf").items():
            monkeypatch.setenv(key, value)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("quantkit.checkpoint.hub.Retry", lambda: QUICK)
        monkeypatch.setattr("quantkit.checkpoint.hub_download.SMALL", 1 << 10)  # treat shards as large files
        yield HubCase(hub, moe_source, tmp_path / "hf", lambda: tuple(capsys.readouterr()))  # type: ignore[arg-type, return-value]
