"""What goes wrong between the Hub and the disk while converting, through the command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hub_server import HubServer
from tests.quantkit.convert.hub_cases import NAME, HubCase, Result, document, same_core


def test_breaks_and_busy_servers_are_gone_over(
    case: HubCase, local_digests: dict[str, str], tmp_path: Path
) -> None:
    broken, busy, reset, size = *case.shards[1:4], case.sizes[case.shards[1]]

    def arrange(name: str) -> None:  # at the first body: the headers have been read
        if not case.hub.faults:
            case.hub.fault(broken, "drop", after=size // 3, times=2)
            case.hub.fault(busy, "status", status=503, times=3)
            case.hub.fault(busy, "status", status=502, where="hub")
            case.hub.fault(reset, "reset", after=200_000)

    case.at_body(arrange)
    assert case.convert(tmp_path / "out").code == 0
    assert same_core(tmp_path / "out", local_digests)
    assert [f.times for f in case.hub.faults] == [0, 0, 0, 0]
    starts = [
        int((r.range or "=0-").partition("=")[2].partition("-")[0]) for r in case.bodies() if r.file == broken
    ]
    assert starts[0] == 0 < starts[1] < starts[2]  # each goes on where the last one broke
    assert sum(r.sent for r in case.bodies() if r.file == broken) < size * 1.2


def test_a_server_that_ends_for_good_leaves_a_resumable_state(
    case: HubCase, local_digests: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifth, size = case.shards[4], case.sizes[case.shards[4]]

    def end(name: str) -> None:
        if name == fifth and not case.hub.faults:
            case.hub.fault(fifth, "drop", after=size // 2)
        elif name == fifth:
            case.hub.stop()

    case.at_body(end)
    result = case.convert(tmp_path / "out", "--json")
    assert result.code == 4 and fifth in result.message, result.err
    assert document(result)["error"]["type"] == "EnvironmentProblem"
    assert not (tmp_path / "out").exists()
    again = case.convert(tmp_path / "out")
    assert again.code == 4 and "cannot be reached" in again.message  # still down: headers can't be read
    with HubServer() as back:
        back.add(NAME, case.source)
        monkeypatch.setenv("HF_ENDPOINT", back.endpoint)
        case.hub = back
        assert case.convert(tmp_path / "out").code == 0
        assert case.asked() == case.shards[4:]
        part = int((case.bodies()[0].range or "").removeprefix("bytes=").partition("-")[0])
        assert size // 3 < part <= size // 2
    assert same_core(tmp_path / "out", local_digests)


@pytest.mark.parametrize("small", [1 << 10, 8 << 20])
def test_bytes_with_another_digest_are_refused(
    case: HubCase, local_digests: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: int
) -> None:
    """As large file (received here) and as small one (received by huggingface_hub, which looks at sizes only)."""
    monkeypatch.setattr("quantkit.checkpoint.hub_download.SMALL", small)
    third = case.shards[2]
    wrong = tmp_path / "wrong"
    data = bytearray((case.source / third).read_bytes())
    data[-7] ^= 1
    wrong.write_bytes(data)
    [revision] = case.hub.repos[NAME].commits.values()
    revision.files[third] = wrong
    result = case.convert(tmp_path / "out", "--json")
    assert result.code == 3 and third in result.message and "sha256" in result.message
    assert document(result)["error"]["type"] == "SourceError"
    assert sorted(case.cached()) == case.shards[:2]
    assert not (tmp_path / "out.partial" / "prefill" / third).exists()
    revision.files[third] = case.source / third
    before = len(case.hub.requests)
    assert case.convert(tmp_path / "out").code == 0
    assert sorted(set(case.asked(before))) == case.shards[2:]
    assert same_core(tmp_path / "out", local_digests)


def test_a_cached_copy_that_is_damaged_is_named(case: HubCase, tmp_path: Path) -> None:
    assert case.convert(tmp_path / "first", "--prefill", "copy").code == 0
    blob = case.cached()[case.shards[5]]
    data = bytearray(blob.read_bytes())
    data[-7] ^= 1
    blob.write_bytes(data)
    result = case.convert(tmp_path / "out")
    assert result.code == 3 and case.shards[5] in result.message and str(blob) in result.err
    blob.unlink()
    assert case.convert(tmp_path / "out").code == 0


def program(case: HubCase, *arguments: str | Path, limit: int | None = None) -> subprocess.Popen[str]:
    """A real process, its files limited to ``limit`` bytes each: the kernel's own refusal to write more."""

    def prepare() -> None:
        if limit is not None:
            import resource

            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    command = [sys.executable, "-m", "quantkit", "convert", NAME, "--method", "rtn", *map(str, arguments)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=prepare
    )


def test_a_full_disk_stops_the_download(case: HubCase, local_digests: dict[str, str], tmp_path: Path) -> None:
    limit = max(case.sizes.values()) - 1000
    child = program(case, "-o", tmp_path / "out", "--json", limit=limit)
    out, err = child.communicate(timeout=60)
    result = Result(child.returncode, out, err)
    assert result.code == 4 and "no space left on the disk while downloading" in result.message
    assert document(result)["exit_code"] == 4
    before = len(case.hub.requests)
    assert case.convert(tmp_path / "out").code == 0
    assert set(case.asked(before)) <= {name for name in case.shards if case.sizes[name] > limit}
    assert same_core(tmp_path / "out", local_digests)


@pytest.mark.parametrize("what", ["headers", "weights"])
def test_ctrl_c_is_noticed_while_waiting_for_the_server(
    case: HubCase, local_digests: dict[str, str], tmp_path: Path, what: str
) -> None:
    def busy(name: str) -> None:
        if name == case.shards[3] and child.poll() is None:
            case.hub.fault(name, "status", status=503, retry_after=60)

    if what == "headers":
        case.hub.fault(case.shards[3], "status", status=503, retry_after=60, times=9)
    else:
        case.at_body(busy)
    child = program(case, "-j", "2", "-o", tmp_path / "out")
    try:
        deadline = time.monotonic() + 30
        while not any(r.status == 503 for r in case.hub.requests) and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.3)
        asked_to_stop = time.monotonic()
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=20)
    finally:
        child.kill()
    assert time.monotonic() - asked_to_stop < 5
    assert child.returncode == 130 and "Traceback" not in err, err
    assert ("resumes where it stopped" in err) == (what == "weights"), err
    case.hub.faults.clear()
    assert case.convert(tmp_path / "out").code == 0
    assert same_core(tmp_path / "out", local_digests)
