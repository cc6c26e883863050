"""The Hub cache as a source: offline with a full, a partial and an empty cache; giving files up again."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quantkit.checkpoint.hub import HubStore
from quantkit.checkpoint.hub_cache import RepoCache
from quantkit.errors import EnvironmentProblem, SourceError, UsageError
from tests.hub_server import HubServer
from tests.quantkit.checkpoint.hub_case import (
    CONFIG,
    INDEX_NAME,
    OTHER,
    OTHER_BYTES,
    QUICK,
    REPO,
    SHARD,
    SHARD_BYTES,
    cached,
)


def download_all(hub: HubServer) -> HubStore:
    """Fill the cache file by file; returns the store that did."""
    store = HubStore(REPO, retry=QUICK)
    for name in store.names():
        store.fetch(name)
    return store


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_a_full_cache_serves_offline_what_the_hub_served(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    online = download_all(hub)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = len(hub.requests)
    store = HubStore(REPO)
    assert store.revision == online.revision
    assert dict(store.names()) == dict(online.names())
    assert {n: store.etag(n) for n in store.names()} == {n: online.etag(n) for n in online.names()}
    assert store.read_at(SHARD, 5, 100) == SHARD_BYTES[5:105]
    assert store.read_at("config.json", 0, len(CONFIG)) == CONFIG
    assert store.fetch(OTHER).read_bytes() == OTHER_BYTES
    assert HubStore(f"{REPO}@{online.revision}").revision == online.revision
    assert len(hub.requests) == before


def test_an_empty_cache_offline_says_what_to_download(hub: HubServer, offline: None) -> None:
    with pytest.raises(EnvironmentProblem, match=r"not in the local cache.*hf download acme/moe$") as caught:
        HubStore(REPO)
    assert caught.value.exit_code == 4 and not hub.requests


def test_a_partial_cache_offline_names_the_missing_shard(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    store = HubStore(REPO, retry=QUICK)
    for name in ("config.json", INDEX_NAME, SHARD):
        store.fetch(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(EnvironmentProblem, match=rf"{OTHER} not in .*hf download acme/moe {OTHER}"):
        HubStore(REPO)


def test_a_partial_cache_without_its_index_never_passes_for_the_whole(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    HubStore(REPO, retry=QUICK).fetch(SHARD)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(EnvironmentProblem, match=INDEX_NAME):
        HubStore(REPO)


def test_a_partial_cache_online_is_used_and_the_rest_read_from_the_hub(hub: HubServer) -> None:
    HubStore(REPO, retry=QUICK).fetch(SHARD)
    served = hub.served_bytes("*.safetensors")
    store = HubStore(REPO, retry=QUICK)
    assert store.read_at(SHARD, 9, 9) == SHARD_BYTES[9:18]
    assert hub.served_bytes("*.safetensors") == served
    assert store.read_at(OTHER, 9, 9) == OTHER_BYTES[9:18]
    assert hub.served_bytes("*.safetensors") == served + 9


def test_a_snapshot_that_hf_download_completed_needs_no_network(hub: HubServer) -> None:
    from huggingface_hub import snapshot_download

    snapshot_download(REPO, endpoint=hub.endpoint, cache_dir=os.environ["HF_HUB_CACHE"])
    commit = hub.repos[REPO].refs["main"]
    before = len(hub.requests)
    store = HubStore(REPO, revision=commit)
    assert store.read_at(OTHER, 1, 2) == OTHER_BYTES[1:3]
    assert len(hub.requests) == before
    assert store.etag(OTHER) == HubStore(REPO).etag(OTHER)


def test_a_blob_of_another_revision_is_used(hub: HubServer, repo: Path) -> None:
    HubStore(REPO, retry=QUICK).fetch(SHARD)
    (repo / "README.md").write_text("a newer commit")
    hub.add(REPO, repo)
    served = hub.served_bytes(SHARD)
    store = HubStore(REPO, retry=QUICK)
    path = store.local_path(SHARD)
    assert path is not None and path.read_bytes() == SHARD_BYTES
    assert hub.served_bytes(SHARD) == served


def test_a_cached_file_of_the_wrong_size_is_an_error(hub: HubServer) -> None:
    store = HubStore(REPO, retry=QUICK)
    os.truncate(store.fetch(SHARD), 1000)
    with pytest.raises(SourceError, match=r"1,000 bytes.*--force-download"):
        store.read_at(SHARD, 0, 10)


def test_consume_frees_link_and_blob_and_can_be_repeated(hub: HubServer, tmp_path: Path) -> None:
    store = download_all(hub)
    blobs = cached(tmp_path) / "blobs"
    assert (blobs / str(store.etag(SHARD))).exists()
    store.consume(SHARD)
    store.consume(SHARD)
    assert not (blobs / str(store.etag(SHARD))).exists()
    assert store.local_path(SHARD) is None
    assert store.fetch(OTHER).read_bytes() == OTHER_BYTES
    assert store.read_at(SHARD, 3, 4) == SHARD_BYTES[3:7]  # from the Hub again
    assert store.fetch(SHARD).read_bytes() == SHARD_BYTES


def test_consume_leaves_a_hard_link_elsewhere_alone(hub: HubServer, tmp_path: Path) -> None:
    store = HubStore(REPO, retry=QUICK)
    os.link(store.fetch(SHARD).resolve(), tmp_path / "kept")
    store.consume(SHARD)
    assert (tmp_path / "kept").read_bytes() == SHARD_BYTES


def test_consume_keeps_a_blob_that_another_snapshot_uses(hub: HubServer, repo: Path, tmp_path: Path) -> None:
    old = HubStore(REPO, retry=QUICK)
    old.fetch(SHARD)
    (repo / "README.md").write_text("a newer commit")
    hub.add(REPO, repo)
    new = HubStore(REPO, retry=QUICK)
    new.fetch(OTHER)
    snapshot = cached(tmp_path) / "snapshots" / str(new.revision)
    (snapshot / SHARD).symlink_to(f"../../blobs/{new.etag(SHARD)}")
    new.consume(SHARD)
    assert not os.path.lexists(snapshot / SHARD)
    assert (cached(tmp_path) / "blobs" / str(old.etag(SHARD))).read_bytes() == SHARD_BYTES
    assert old.fetch(SHARD).read_bytes() == SHARD_BYTES
    old.consume(SHARD)
    assert not (cached(tmp_path) / "blobs" / str(old.etag(SHARD))).exists()


def test_consume_never_leaves_the_cache(hub: HubServer, tmp_path: Path) -> None:
    store = HubStore(REPO, retry=QUICK)
    link = store.fetch(SHARD)
    precious = tmp_path / "precious.safetensors"
    precious.write_bytes(SHARD_BYTES)
    link.unlink()
    link.symlink_to(precious)
    with pytest.raises(UsageError, match="outside of the Hub cache"):
        store.consume(SHARD)
    assert precious.exists() and link.is_symlink()

    link.unlink()
    elsewhere = tmp_path / "elsewhere"
    link.parent.rename(elsewhere)
    (elsewhere / SHARD).write_bytes(SHARD_BYTES)
    link.parent.symlink_to(elsewhere)
    with pytest.raises(UsageError, match="outside of the Hub cache"):
        store.consume(SHARD)
    assert (elsewhere / SHARD).exists()


def test_consume_of_a_cache_without_links(hub: HubServer, tmp_path: Path) -> None:
    store = HubStore(REPO, retry=QUICK)
    link = store.fetch(SHARD)
    blob = link.resolve()
    link.unlink()
    blob.rename(link)
    store.consume(SHARD)
    assert not link.exists() and store.local_path(SHARD) is None


def test_consume_sweeps_the_shared_store_of_xet_files(hub: HubServer, tmp_path: Path) -> None:
    from huggingface_hub.utils._shared_blobs import publish_blob_to_shared_store

    cache = Path(os.environ["HF_HUB_CACHE"])
    store = HubStore(REPO, retry=QUICK)
    blob = cached(tmp_path) / "blobs" / store.fetch(SHARD).resolve().name
    assert publish_blob_to_shared_store(
        blob_path=str(blob), xet_hash="ab" * 32, cache_dir=cache, expected_size=len(SHARD_BYTES)
    )
    shared = cache / "blobs" / "ab" / ("ab" * 32)
    assert blob.is_symlink() and shared.exists()
    assert store.read_at(SHARD, 1, 5) == SHARD_BYTES[1:6]
    store.consume(SHARD)
    assert not shared.exists() and not os.path.lexists(blob)


def test_files_are_consumed_by_several_threads_at_once(tmp_path: Path) -> None:
    """Each looks through all links, of which the others delete some."""
    cache = RepoCache(tmp_path, REPO)
    names = [f"model-{number:05}.safetensors" for number in range(400)]
    etags = {name: f"{number:064x}" for number, name in enumerate(names)}
    home = cache.snapshot("c" * 40)
    home.mkdir(parents=True)
    cache.blobs.mkdir()
    for name, etag in etags.items():
        (cache.blobs / etag).write_bytes(b"1234")
        (home / name).symlink_to(f"../../blobs/{etag}")
    with ThreadPoolExecutor(8) as pool:
        freed = list(pool.map(lambda name: cache.consume("c" * 40, name, etags[name]), names))
    assert freed == [4] * len(names)
    assert not list(home.iterdir()) and not list(cache.blobs.iterdir())
