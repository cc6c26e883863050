"""The Hub end to end through the command line: real HTTP on loopback, faults included. ``--consume`` has its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.builders import write_moe
from tests.hub_server import HubServer
from tests.quantkit.convert.cases import core_digests
from tests.quantkit.convert.hub_cases import HEADER, NAME, TOKEN, HubCase, Result

WEIGHT = "model.layers.1.mlp.experts.0.up_proj"


def same_core(out: Path, local: dict[str, str]) -> bool:
    """Everything but manifest.json, which names the source."""
    return {name: sha256 for name, sha256 in core_digests(out).items() if name != "manifest.json"} == local


def document(result: Result) -> Any:
    return json.loads(result.out)


# reading without downloading


def test_plan_reads_headers_only(case: HubCase, tmp_path: Path) -> None:
    other = write_moe(tmp_path / "other", "glm_moe_dsa", layers=3, shards=2)
    main, dev = case.hub.repos[NAME].refs["main"], case.hub.add(NAME, other, ref="dev")
    plan = document(case.run("plan", NAME, "--json"))
    assert plan["source"]["revision"] == main
    assert case.hub.served_bytes("*.safetensors") <= 8 * (128 << 10)
    assert {r.range for r in case.hub.seen("cdn", "*.safetensors")} == {HEADER}
    for revision in ("dev", dev):
        found = document(case.run("plan", NAME, "--revision", revision, "--json"))
        assert found["source"]["revision"] == dev and found["plan_id"] != plan["plan_id"]
    assert document(case.run("plan", f"{NAME}@{main}", "--json"))["plan_id"] == plan["plan_id"]
    assert not case.cached() and not case.asked()


@pytest.mark.parametrize("revision", [(), ("--revision", "dev")])
def test_offline_with_nothing_cached_says_how_to_get_it(
    case: HubCase, monkeypatch: pytest.MonkeyPatch, revision: tuple[str, ...]
) -> None:
    assert case.run("plan", NAME).code == 0  # leaves config and index in the cache, not the weights
    asked = len(case.hub.requests)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = case.run("plan", NAME, *revision, "--json")
    assert result.code == 4 and "HF_HUB_OFFLINE forbids the network" in result.message
    error = document(result)["error"]
    assert document(result)["exit_code"] == 4 and error["type"] == "EnvironmentProblem"
    assert f"hf download {NAME}" in error["hint"] and " ".join(revision) in error["hint"]
    assert len(case.hub.requests) == asked


def test_inspect_reads_what_it_shows(case: HubCase) -> None:
    found = document(case.run("inspect", NAME, "--json"))
    assert found["kind"] == "hub" and found["family"] == "glm_moe_dsa"
    before = case.hub.served_bytes("*.safetensors")
    assert before <= 8 * (128 << 10)
    remote = document(case.run("inspect", NAME, "--tensor", WEIGHT, "--json"))
    local = document(case.run("inspect", case.source, "--tensor", WEIGHT, "--json"))
    assert remote == local
    read = case.hub.served_bytes("*.safetensors") - before - 8 * (128 << 10)
    assert 0 < read <= 2 * (128 * 256 + 8)  # two passes over codes and scales: not the shard
    assert not case.cached()
    missing = case.run("inspect", NAME, "--tensor", WEIGHT.replace("up_proj", "up_porj"))
    assert missing.code == 2 and "no tensor" in missing.message and "Did you mean" in missing.err


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("plan", "acme/mow"), 3, "no such repository"),
        (("plan", NAME, "--revision", "v9"), 3, "no such revision"),
        (("plan", f"{NAME}@v9", "--revision", "main"), 2, "two revisions"),
        (("plan", "acme/moe/x"), 2, "no such file"),
        (("plan", f"https://huggingface.co/{NAME}"), 2, "no such file"),
        (("plan", "glm-5.3"), 2, "no such file"),
        (("verify", "nowhere", "--against", NAME), 3, "nowhere"),
    ],
)
def test_mistakes_are_one_sentence(case: HubCase, arguments: tuple[str, ...], code: int, says: str) -> None:
    result = case.run(*arguments, "--json")
    assert result.code == code and says in result.message
    assert document(result)["exit_code"] == code and says in str(document(result)["error"])


def test_nothing_shows_the_token(case: HubCase, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    case.hub.token = TOKEN
    case.hub.fault("*-00003-*", "status", status=503, times=99)
    assert "HTTP 503" in case.convert(tmp_path / "out", "-v").err  # with the traceback
    assert "HTTP 503" in case.convert(tmp_path / "out").message
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    assert case.run("plan", NAME).code == 3
    assert not any(r.token for r in case.hub.seen("cdn"))


# converting


def test_shards_come_one_by_one_and_the_result_is_that_of_local_files(
    case: HubCase, local_digests: dict[str, str], tmp_path: Path
) -> None:
    progress: list[tuple[str, int]] = []

    def look(name: str) -> None:
        journal = (tmp_path / "out.partial" / "journal.jsonl").read_text()
        progress.append((name, journal.count('"kind":"source"')))

    case.at_body(look)
    result = case.convert(tmp_path / "out")
    assert result.code == 0, result.err
    assert progress == [(name, number) for number, name in enumerate(case.shards)]  # asked for when needed
    assert sum(r.sent for r in case.bodies()) == sum(case.sizes.values())
    assert same_core(tmp_path / "out", local_digests)
    for name, blob in case.cached().items():
        assert (tmp_path / "out" / "prefill" / name).samefile(blob)
    local = case.run("convert", case.source, "--method", "rtn", "-o", tmp_path / "local")
    assert local.code == 0
    here, there = (json.loads((tmp_path / n / "manifest.json").read_text()) for n in ("out", "local"))
    assert here["source"].pop("revision") == case.hub.repos[NAME].refs["main"]
    assert (here["source"].pop("kind"), here["source"].pop("label")) == ("hub", NAME)
    assert (there["source"].pop("kind"), there["source"].pop("label", None)) == ("local", None)
    there["source"].pop("revision", None)
    assert here == there  # pair_id included: the same tensors by the same recipe


def test_a_plan_file_pins_the_commit(case: HubCase, local_digests: dict[str, str], tmp_path: Path) -> None:
    assert case.run("plan", NAME, "--method", "rtn", "-o", tmp_path / "plan.json").code == 0
    case.hub.add(NAME, write_moe(tmp_path / "newer", "glm_moe_dsa", layers=3, shards=2))  # main moves on
    result = case.run("convert", "--plan", tmp_path / "plan.json", "-o", tmp_path / "out")
    assert result.code == 0, result.err
    assert same_core(tmp_path / "out", local_digests)


def test_verify_and_diff_against_the_hub(case: HubCase, tmp_path: Path) -> None:
    out = tmp_path / "out"
    other = case.hub.add(NAME, write_moe(tmp_path / "o", "glm_moe_dsa", layers=6, shards=8, seed=5), ref="dev")
    assert case.convert(out).code == 0
    good = case.run("verify", out, "--against", f"{NAME}@main", "--json")
    assert good.code == 0 and document(good)["ok"], good.err
    bad = case.run("verify", out, "--against", f"{NAME}@{other}", "--json")
    assert bad.code == 1 and not document(bad)["ok"]
    shutil.rmtree(case.home)
    before = len(case.hub.requests)
    changed = document(case.run("diff", NAME, out, "--json"))
    assert changed == document(case.run("diff", case.source, out, "--json")) | {"a": NAME}
    assert not case.cached() and len(case.bodies(before)) > 100  # by ranges, nothing is kept
    same = document(case.run("diff", "--quick", NAME, case.source, "--json"))
    assert not same["added"] and not same["removed"] and not same["changed"]


def test_progress_moves_while_a_shard_downloads(
    case: HubCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.cli.console.LINE_SECONDS", 0.0)
    result = case.convert(tmp_path / "out")
    lines = [line for line in result.err.splitlines() if line.startswith("converting: ")]
    first = next(i for i, line in enumerate(lines) if line.endswith(case.shards[0]))
    assert sum(line.endswith(case.shards[0]) for line in lines[first : first + 4]) == 4  # several of one shard
    shares = [int(line.partition("(")[2].partition(" %")[0]) for line in lines]
    assert shares == sorted(shares) and shares[-1] == 100


# faults


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
