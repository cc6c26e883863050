"""``convert --consume`` through the command line: what is on the disk at any time, and after being killed."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.quantkit.convert.cases import core_digests, errors_of, run
from tests.quantkit.convert.fork_runs import Forks
from tests.quantkit.convert.hub_cases import NAME, HubCase, Watcher, same_core

SPREAD = 2


@pytest.fixture
def forks(case: HubCase) -> Iterator[Forks]:
    runs = Forks(os.environ | {"OMP_NUM_THREADS": "1"})
    yield runs
    runs.close()


def placed(work: Path) -> set[str]:
    """Source files that the journal calls placed."""
    journal = work / "journal.jsonl"
    lines = journal.read_text().splitlines() if journal.exists() else []
    entries = [json.loads(line) for line in lines if line.endswith("}")]
    return {entry["file"] for entry in entries if entry["kind"] == "source"}


@pytest.mark.parametrize(("mode", "jobs"), [("auto", "1"), ("copy", "3")])
def test_few_shards_are_in_the_cache_at_any_time(
    case: HubCase, local_digests: dict[str, str], tmp_path: Path, mode: str, jobs: str
) -> None:
    with Watcher(case.cache_bytes) as watcher:
        case.at_body(lambda name: watcher.look())  # and surely when the next shard is about to come
        result = case.convert(tmp_path / "out", "--consume", "--prefill", mode, "-j", jobs)
    assert result.code == 0, result.err
    largest = max(case.sizes.values())
    assert watcher.most <= (2 + int(jobs)) * largest < sum(case.sizes.values())
    assert not case.cached() and case.cache_bytes() == 0
    assert sorted(case.asked()) == case.shards  # each once
    assert same_core(tmp_path / "out", local_digests)
    assert case.run("verify", tmp_path / "out").code == 0
    before = len(case.hub.requests)
    again = case.convert(tmp_path / "out", "--consume")
    assert again.code == 0 and "complete already" in again.err and not case.asked(before)


@pytest.mark.parametrize(
    ("source", "options", "says"),
    [
        ("tiny-glm", (), "is a bundled source"),
        ("LOCAL", (), "is a local source"),
        (NAME, ("--prefill", "reference"), "the only copy"),
        (NAME, (), "a calibrated method reads the source's files until the end"),
    ],
)
def test_refused_where_nothing_may_be_deleted(
    case: HubCase, tmp_path: Path, source: str, options: tuple[str, ...], says: str
) -> None:
    source = str(case.source) if source == "LOCAL" else source
    result = case.run("convert", source, "--consume", *options, "-o", tmp_path / "out", "--json")
    assert result.code == 2 and says in result.message + result.err
    assert json.loads(result.out)["error"]["where"] == "--consume"
    assert not case.asked() and not list(tmp_path.glob("out*"))


def test_kill_9_at_any_point(case: HubCase, forks: Forks, local_digests: dict[str, str], tmp_path: Path) -> None:
    """What was finished is not downloaded again, whatever the moment; and the bytes come out the same."""
    log = tmp_path / "log"
    repo = f"{NAME}-log"
    case.hub.add(repo, case.source)
    assert forks.run(*case.command(tmp_path / "log-out", repo), "--consume", log=log) == 0
    calls = log.read_text().splitlines()
    deletions = [i for i, call in enumerate(calls, 1) if re.match(r"unlink .*/blobs/\w{64}$", call)]
    assert len(deletions) == len(case.shards)
    points = [i + after for i in deletions[1::6] for after in (0, 1)]
    points += random.Random(3).sample(range(1, len(calls)), SPREAD)
    consumed = 0
    for number, point in enumerate(sorted(points)):
        repo, out = f"{NAME}-{number}", tmp_path / f"out-{number}"
        case.hub.add(repo, case.source)
        assert forks.run(*case.command(out, repo), "--consume", kill=point) == -signal.SIGKILL
        finished = placed(tmp_path / f"out-{number}.partial") | set(case.cached(repo))
        consumed += len(finished - set(case.cached(repo)))
        before = len(case.hub.requests)
        assert forks.run(*case.command(out, repo), "--consume", "-j", "2") == 0
        assert not finished.intersection(case.asked(before, repo)), (point, calls[point - 1])
        assert not case.cached(repo)
        assert same_core(out, local_digests), (point, calls[point - 1])
    assert consumed >= 10  # else nothing was shown


def test_a_layer_under_a_budget_keeps_its_sources_until_its_verdict(case: HubCase, tmp_path: Path) -> None:
    """One layer is over its limit and written anew, from shards that are asked for once."""
    run(case.source, tmp_path / "all", method="mse")
    budget = {"max_relative_error": max(errors_of(tmp_path / "all")) - 2e-6, "action": "keep-fp8"}
    local = run(case.source, tmp_path / "local", method="mse", budget=budget)
    assert len(local.manifest.plan_amendments) == 1
    recipe = tmp_path / "careful.yaml"
    content = {"schema_version": 1, "name": "careful", "source": {"repo": NAME}, "decode": {"method": "mse"}}
    recipe.write_text(json.dumps({**content, "budget": budget}))
    result = case.run("convert", recipe, "--consume", "-j", "2", "-o", tmp_path / "out")
    assert result.code == 0, result.err
    assert sorted(case.asked()) == case.shards and not case.cached()
    digests = {
        name: sha256 for name, sha256 in core_digests(tmp_path / "local").items() if name != "manifest.json"
    }
    assert same_core(tmp_path / "out", digests)


def test_kill_9_in_the_middle_of_a_shard(
    case: HubCase, forks: Forks, local_digests: dict[str, str], tmp_path: Path
) -> None:
    fifth = case.shards[4]
    half = case.sizes[fifth] // 2

    def stall(name: str) -> None:
        if name == fifth and not case.hub.faults:
            case.hub.fault(fifth, "stall", after=half, delay=5)

    case.at_body(stall)
    pid = forks.start(*case.command(tmp_path / "out"), "--consume")
    deadline = time.monotonic() + 20
    while case.hub.served_bytes(fifth) < half + 100_000 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    assert forks.wait() == -signal.SIGKILL
    before = len(case.hub.requests)
    assert forks.run(*case.command(tmp_path / "out"), "--consume") == 0
    assert case.asked(before) == case.shards[4:]
    part = int((case.bodies(before)[0].range or "").removeprefix("bytes=").partition("-")[0])
    assert 0 < part <= half
    assert same_core(tmp_path / "out", local_digests)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_consumed_shard_that_is_needed_again_is_read_from_the_view(
    case: HubCase, local_digests: dict[str, str], tmp_path: Path, damaged: bool
) -> None:
    """Output was lost after its sources left the cache: they are in prefill/, and checked before they are used."""
    second, last = case.shards[1], case.shards[7]
    down = True

    def refuse(name: str) -> None:
        if name == last and down:
            case.hub.fault(name, "status", status=503)

    case.at_body(refuse)
    assert case.convert(tmp_path / "out", "--consume").code == 4
    work = tmp_path / "out.partial"
    assert second in placed(work) and second not in case.cached()
    lost = sorted((work / "decode").glob("model-layer-*.safetensors"))[:3]
    for path in lost:
        os.truncate(path, 1000)
    if damaged:
        with open(work / "prefill" / second, "r+b") as handle:
            handle.seek(-5, 2)
            handle.write(b"\0\1\2\3\4")
    down = False
    before = len(case.hub.requests)
    assert case.convert(tmp_path / "out", "--consume").code == 0
    assert case.asked(before) == ([second, last] if damaged else [last])
    assert same_core(tmp_path / "out", local_digests) and not case.cached()
