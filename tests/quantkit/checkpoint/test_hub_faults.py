"""Broken connections, busy servers and wrong answers: what is retried, what is resumed, and how it ends."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from quantkit.checkpoint.hub import HubStore, Retry
from quantkit.errors import EnvironmentProblem, SourceError
from tests.hub_server import HubServer
from tests.quantkit.checkpoint.hub_case import MIB, OTHER, QUICK, REPO, SHARD, SHARD_BYTES, cached


def ranges(hub: HubServer) -> list[str | None]:
    return [r.range for r in hub.seen("cdn")]


@pytest.mark.parametrize("kind", ["drop", "reset"])
def test_a_broken_range_read_goes_on_where_it_broke(hub: HubServer, kind: str) -> None:
    store = HubStore(REPO, retry=QUICK)
    hub.fault(SHARD, kind, after=300_000, times=2)
    assert store.read_at(SHARD, 1000, MIB) == SHARD_BYTES[1000 : 1000 + MIB]
    starts = [int(str(r).removeprefix("bytes=").split("-")[0]) for r in ranges(hub)]
    assert len(starts) == 3 and starts == sorted(starts) and starts[1] > 1000
    if kind == "drop":  # a reset may throw away bytes on the way, a close does not
        assert starts == [1000, 301_000, 601_000]
        assert hub.served_bytes(SHARD) == MIB


@pytest.mark.parametrize("kind", ["drop", "reset"])
def test_a_broken_download_is_not_served_again_from_zero(hub: HubServer, kind: str) -> None:
    store = HubStore(REPO, retry=QUICK)
    hub.fault(SHARD, kind, after=5 * MIB)
    assert store.fetch(SHARD).read_bytes() == SHARD_BYTES
    assert hub.served_bytes(SHARD) <= len(SHARD_BYTES) + (0 if kind == "drop" else 4 * MIB)


def test_a_download_resumes_after_its_process_gave_up(hub: HubServer, tmp_path: Path) -> None:
    hub.fault(SHARD, "drop", after=5 * MIB)
    with pytest.raises(EnvironmentProblem, match="cannot be reached"):
        HubStore(REPO, retry=Retry(attempts=1)).fetch(SHARD)
    [part] = (cached(tmp_path) / "blobs").glob("*.incomplete")
    assert part.stat().st_size == 5 * MIB
    assert HubStore(REPO, retry=QUICK).fetch(SHARD).read_bytes() == SHARD_BYTES
    assert hub.served_bytes(SHARD) == len(SHARD_BYTES)
    assert not list((cached(tmp_path) / "blobs").glob("*.incomplete"))


def test_damaged_bytes_of_an_earlier_attempt_are_found_and_dropped(hub: HubServer, tmp_path: Path) -> None:
    hub.fault(SHARD, "drop", after=MIB)
    with pytest.raises(EnvironmentProblem):
        HubStore(REPO, retry=Retry(attempts=1)).fetch(SHARD)
    [part] = (cached(tmp_path) / "blobs").glob("*.incomplete")
    part.write_bytes(b"\0" * MIB)
    store = HubStore(REPO, retry=QUICK)
    with pytest.raises(SourceError, match="sha256"):
        store.fetch(SHARD)
    assert store.local_path(SHARD) is None
    assert store.fetch(SHARD).read_bytes() == SHARD_BYTES


@pytest.mark.parametrize("where", ["hub", "body", "api"])
@pytest.mark.parametrize("status", [500, 503, 429])
def test_busy_servers_are_asked_again(hub: HubServer, where: str, status: int) -> None:
    hub.fault("*", "status", status=status, times=3, where=where)
    assert HubStore(REPO, retry=QUICK).read_at(SHARD, 0, 100) == SHARD_BYTES[:100]


@pytest.mark.parametrize("header", ["retry_after", "rate_limit"])
def test_the_wait_that_a_server_asks_for_is_honoured(hub: HubServer, header: str) -> None:
    store = HubStore(REPO, retry=QUICK)
    hub.fault(SHARD, "status", status=429, **{header: 1})
    begun = time.monotonic()
    store.read_at(SHARD, 0, 10)
    assert time.monotonic() - begun >= 1


def test_a_long_retry_after_is_an_error_at_once(hub: HubServer) -> None:
    store = HubStore(REPO, retry=QUICK)
    hub.fault(SHARD, "status", status=429, retry_after=3600, times=9)
    with pytest.raises(EnvironmentProblem, match="limits the rate"):
        store.read_at(SHARD, 0, 10)
    assert len(hub.seen("cdn")) == 1


def test_a_server_that_stays_down_ends_the_attempts(hub: HubServer) -> None:
    store = HubStore(REPO, retry=QUICK)
    hub.fault(SHARD, "status", status=503, times=99)
    with pytest.raises(EnvironmentProblem, match=rf"{SHARD}: the Hub answers HTTP 503 \(5 attempts\)") as caught:
        store.read_at(SHARD, 0, 10)
    assert len(hub.seen("cdn")) == QUICK.attempts
    assert "http://" not in str(caught.value) and "signature" not in str(caught.value)


def test_what_cannot_pass_is_not_retried(hub: HubServer) -> None:
    store = HubStore(REPO, retry=QUICK)
    hub.fault(SHARD, "status", status=403, times=9)
    with pytest.raises(SourceError, match="HTTP 403"):
        store.read_at(SHARD, 0, 10)
    assert len(hub.seen("cdn")) == 1


def test_a_server_without_ranges_is_not_read_to_the_end(hub: HubServer, repo: Path) -> None:
    big = "big.safetensors"
    with (repo / big).open("wb") as file:
        file.write(b"header bytes")
        file.truncate(200 * MIB)
    hub.add(REPO, repo)
    store = HubStore(REPO, retry=QUICK)
    hub.fault(big, "ignore_range", times=9)
    assert store.read_at(big, 0, 12) == b"header bytes"
    assert store.read_at(big, 7, 10) == b"bytes" + bytes(5)
    time.sleep(0.1)
    assert hub.served_bytes(big) < 40 * MIB  # what the sockets' buffers swallowed
    before = hub.served_bytes(big)
    with pytest.raises(EnvironmentProblem, match="does not serve byte ranges"):
        store.read_at(big, 150 * MIB, 10)
    time.sleep(0.1)
    assert hub.served_bytes(big) - before < 40 * MIB


def test_a_server_without_ranges_can_still_be_downloaded_from(hub: HubServer) -> None:
    store = HubStore(REPO, retry=QUICK)
    hub.fault(SHARD, "drop", after=5 * MIB)
    hub.fault(SHARD, "ignore_range", times=9)
    assert store.fetch(SHARD).read_bytes() == SHARD_BYTES


@pytest.mark.parametrize("kind", ["wrong_range", "wrong_total"])
def test_wrong_content_ranges_are_retried_and_then_refused(hub: HubServer, kind: str) -> None:
    store = HubStore(REPO, retry=QUICK)
    fault = hub.fault(SHARD, kind, times=2)
    assert store.read_at(SHARD, 10, 100) == SHARD_BYTES[10:110]
    fault.times = 99
    with pytest.raises(EnvironmentProblem, match=rf"{REPO}@\w+/{SHARD}: .*5 attempts"):
        store.read_at(SHARD, 10, 100)


def test_short_bodies_are_completed_or_refused(hub: HubServer) -> None:
    store = HubStore(REPO, retry=QUICK)
    hub.fault(SHARD, "short", after=40)
    assert store.read_at(SHARD, 10, 100) == SHARD_BYTES[10:110]
    assert ranges(hub) == ["bytes=10-109", "bytes=70-109"]
    hub.fault(SHARD, "short", after=100, times=99)
    with pytest.raises(EnvironmentProblem, match="early"):
        store.read_at(SHARD, 10, 100)


def test_a_file_that_shrank_at_the_server_is_refused(hub: HubServer, repo: Path) -> None:
    store = HubStore(REPO, retry=QUICK)
    (repo / SHARD).write_bytes(SHARD_BYTES[:1000])
    with pytest.raises(SourceError, match="shorter than the Hub's listing"):
        store.read_at(SHARD, 2000, 10)


def test_a_full_disk_is_named_before_the_download(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    store = HubStore(REPO, retry=QUICK)
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr("quantkit.checkpoint.hub_download.shutil.disk_usage", lambda path: usage)
    with pytest.raises(EnvironmentProblem, match="1,000 are free"):
        store.fetch(SHARD)
    assert hub.served_bytes(SHARD) == 0


def test_a_disk_that_fills_up_keeps_what_is_there(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = Path.open

    def limited(self: Path, *args: Any, **kwargs: Any) -> Any:
        if args == ("ab",):
            return real_open(Path("/dev/full"), "wb", buffering=0)
        return real_open(self, *args, **kwargs)

    store = HubStore(REPO, retry=QUICK)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", limited)
        with pytest.raises(EnvironmentProblem, match="no space left on the disk") as caught:
            store.fetch(OTHER)
    assert caught.value.exit_code == 4
    assert store.fetch(OTHER).stat().st_size == 9 * MIB


def test_slow_answers_do_not_hurt(hub: HubServer) -> None:
    store = HubStore(REPO, retry=QUICK)
    hub.fault(SHARD, "slow", delay=0.3)
    assert store.read_at(SHARD, 0, 5) == SHARD_BYTES[:5]
