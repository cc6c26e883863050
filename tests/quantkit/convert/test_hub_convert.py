"""The Hub end to end through the command line, real HTTP on loopback."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.builders import write_moe
from tests.quantkit.convert.hub_cases import HEADER, NAME, TOKEN, HubCase, document, same_core

WEIGHT = "model.layers.1.mlp.experts.0.up_proj"


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


def test_offline_a_complete_cache_is_enough(
    case: HubCase, local_digests: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert case.convert(tmp_path / "first").code == 0
    asked = len(case.hub.requests)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = case.convert(tmp_path / "out")
    assert result.code == 0, result.err
    assert same_core(tmp_path / "out", local_digests) and len(case.hub.requests) == asked


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
    bare = case.run("verify", out, "--against", f"{NAME}@main", "--json")
    [source] = [check for check in document(bare)["checks"] if check["name"] == "source"]
    assert bare.code == 0 and "8 of 8 files by the sha256" in source["detail"]
    assert not case.asked(before)  # the Hub's word is as good as the download
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
