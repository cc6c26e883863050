"""HubStore over real HTTP: what is asked for, what is served, and how refusals read."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quantkit.checkpoint.hub import HubStore, Retry, is_hub_id, split_hub_id
from quantkit.checkpoint.store import FileStore
from quantkit.errors import EnvironmentProblem, SourceError, UsageError
from tests.hub_server import HubServer
from tests.quantkit.checkpoint.hub_case import (
    CONFIG,
    INDEX,
    INDEX_NAME,
    MIB,
    OTHER,
    OTHER_BYTES,
    QUICK,
    REPO,
    SHARD,
    SHARD_BYTES,
    cached,
)


def test_opening_lists_and_downloads_nothing(hub: HubServer) -> None:
    store = HubStore(REPO, retry=QUICK)
    assert isinstance(store, FileStore)
    assert store.names() == {
        "config.json": len(CONFIG), "model.safetensors.index.json": len(INDEX),
        SHARD: len(SHARD_BYTES), OTHER: len(OTHER_BYTES),
    }  # fmt: skip
    assert list(store.names()) == sorted(store.names())
    assert store.revision == hub.repos[REPO].refs["main"]
    assert (store.label, store.kind) == (REPO, "hub")
    assert store.etag(SHARD) == store.expected_sha256(SHARD) == hashlib.sha256(SHARD_BYTES).hexdigest()
    assert store.expected_sha256("config.json") is None
    assert len(hub.requests) == 1 and hub.served_bytes() == 0


def test_a_range_read_serves_only_that_range_through_the_redirect(hub: HubServer) -> None:
    store = HubStore(REPO, retry=QUICK)
    assert store.read_at(SHARD, 0, 1000) == SHARD_BYTES[:1000]
    assert store.read_at(SHARD, 7 * MIB + 3, 77) == SHARD_BYTES[7 * MIB + 3 :][:77]
    assert store.read_at(SHARD, len(SHARD_BYTES) - 4, 4) == SHARD_BYTES[-4:]
    assert store.read_at(SHARD, 5, 0) == b""
    assert hub.served_bytes("*.safetensors") == 1000 + 77 + 4
    assert [r.status for r in hub.seen("cdn")] == [206] * 3
    assert store.local_path(SHARD) is None


def test_a_read_past_the_end_is_refused_before_any_request(hub: HubServer) -> None:
    store = HubStore(REPO, retry=QUICK)
    with pytest.raises(SourceError, match="bytes"):
        store.read_at(SHARD, len(SHARD_BYTES) - 3, 4)
    with pytest.raises(SourceError, match=r"nothing\.bin"):
        store.read_at("nothing.bin", 0, 1)
    assert len(hub.requests) == 1


def test_the_token_goes_to_the_hub_and_never_to_the_cdn(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_secret"
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    store = HubStore(REPO, retry=QUICK)
    store.read_at(SHARD, 0, 10)
    store.fetch(SHARD)
    assert {r.token for r in hub.seen("hub")} == {"Bearer hf_secret"}
    assert {r.token for r in hub.seen("cdn")} == {None}


def test_concurrent_reads_are_each_right(hub: HubServer) -> None:
    store = HubStore(REPO, retry=QUICK)
    spans = [((i * 700_001) % (9 * MIB - 5000), 5000 - i) for i in range(24)]
    with ThreadPoolExecutor(store.parallel_reads) as pool:
        got = list(pool.map(lambda s: store.read_at(OTHER, *s), spans))
    assert got == [OTHER_BYTES[o : o + n] for o, n in spans]


def test_fetched_files_are_read_from_disk(hub: HubServer, tmp_path: Path) -> None:
    store = HubStore(REPO, retry=QUICK)
    path = store.fetch(SHARD)
    assert path == cached(tmp_path) / "snapshots" / str(store.revision) / SHARD
    assert path.read_bytes() == SHARD_BYTES
    assert store.local_path(SHARD) == store.fetch(SHARD) == store.local_path(SHARD, download=True) == path
    store.drop_cache(SHARD)
    before = len(hub.requests)
    assert store.read_at(SHARD, 100, 50) == SHARD_BYTES[100:150]
    assert len(hub.requests) == before
    assert hub.served_bytes(SHARD) == len(SHARD_BYTES)


def test_small_files_are_cached_on_first_read(hub: HubServer) -> None:
    first = HubStore(REPO, retry=QUICK)
    assert first.read_at("config.json", 0, len(CONFIG)) == CONFIG
    assert first.read_at(INDEX_NAME, 0, len(INDEX)) == INDEX
    first.fetch(SHARD)
    first.fetch(OTHER)
    hub.stop()
    store = HubStore(REPO, retry=Retry(attempts=1))
    assert store.read_at("config.json", 0, len(CONFIG)) == CONFIG
    assert "cached commit" in store.warnings[0]


def test_huggingface_hub_finds_what_was_fetched(hub: HubServer) -> None:
    from huggingface_hub import try_to_load_from_cache

    store = HubStore(REPO, retry=QUICK)
    path = store.fetch(OTHER)
    cache = os.environ["HF_HUB_CACHE"]
    assert try_to_load_from_cache(REPO, OTHER, cache_dir=cache) == str(path)


def test_a_branch_is_pinned_when_the_source_is_opened(hub: HubServer, repo: Path, tmp_path: Path) -> None:
    store = HubStore(REPO, retry=QUICK)
    newer = tmp_path / "newer"
    newer.mkdir()
    (newer / SHARD).write_bytes(b"another file")
    commit = hub.add(REPO, newer)
    assert store.read_at(SHARD, 0, 12) == SHARD_BYTES[:12]
    later = HubStore(REPO, retry=QUICK)
    assert later.revision == commit and later.read_at(SHARD, 0, 12) == b"another file"
    assert HubStore(f"{REPO}@{store.revision}", retry=QUICK).read_at(SHARD, 0, 12) == SHARD_BYTES[:12]


def test_tags_and_both_ways_to_name_a_revision(hub: HubServer, repo: Path) -> None:
    commit = hub.add(REPO, repo, ref="v1.0")
    assert HubStore(f"{REPO}@v1.0", retry=QUICK).revision == commit
    assert HubStore(REPO, revision="v1.0", retry=QUICK).revision == commit


@pytest.mark.parametrize("text", ["moe", "a/b/c", "../x/y", "acme/mo e", "/acme/moe", "acme/..", "http://a/b"])
def test_what_is_not_a_repository_is_a_usage_error(text: str) -> None:
    assert not is_hub_id(text)
    with pytest.raises(UsageError, match="org/name"):
        split_hub_id(text)


def test_revisions_that_contradict_or_escape_are_usage_errors() -> None:
    assert split_hub_id("a/b") == ("a/b", "main")
    assert split_hub_id("a/b@refs/pr/1") == ("a/b", "refs/pr/1")
    for source, revision in [("a/b@one", "two"), ("a/b@../x", None), ("a/b", "/etc")]:
        with pytest.raises(UsageError):
            split_hub_id(source, revision)


def test_refusals_of_the_hub_name_the_way_out(hub: HubServer) -> None:
    with pytest.raises(SourceError, match=r"acme/none@main: no such repository .*hf auth login"):
        HubStore("acme/none", retry=QUICK)
    with pytest.raises(SourceError, match="no such revision"):
        HubStore(f"{REPO}@nope", retry=QUICK)
    hub.gated.add(REPO)
    store = HubStore(REPO, retry=QUICK)
    with pytest.raises(SourceError, match=r"gated.*Accept its terms at https://huggingface.co/acme/moe"):
        store.read_at(SHARD, 0, 1)
    with pytest.raises(SourceError, match="gated"):
        store.fetch(OTHER)


def test_no_network_is_an_environment_problem(hub: HubServer) -> None:
    hub.stop()
    with pytest.raises(EnvironmentProblem, match="cannot be reached") as caught:
        HubStore(REPO, retry=QUICK)
    assert caught.value.exit_code == 4 and "http" not in str(caught.value)


def test_names_that_leave_the_snapshot_are_refused(hub: HubServer, repo: Path) -> None:
    commit = hub.repos[REPO].commits[hub.repos[REPO].refs["main"]]
    commit.files["../../evil.json"] = repo / "config.json"
    commit.ids["../../evil.json"] = commit.ids["config.json"]
    with pytest.raises(SourceError, match="unsafe name"):
        HubStore(REPO, retry=QUICK)


def test_reading_after_close_is_an_error(hub: HubServer) -> None:
    store = HubStore(REPO, retry=QUICK)
    store.close()
    with pytest.raises(UsageError, match="closed"):
        store.read_at(SHARD, 0, 1)


def test_importing_the_store_does_not_import_huggingface_hub() -> None:
    code = (
        "import sys, quantkit.checkpoint.hub as h; print('huggingface_hub' in sys.modules, 'httpx' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
