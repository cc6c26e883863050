"""Two conversions side by side: against sums made by hand from the records, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit import api
from quantkit.errors import ArtifactError, UsageError
from tests.builders import write_moe
from tests.quantkit.convert.cases import run

Line = dict[str, Any]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe(tmp_path_factory.mktemp("source") / "model", "qwen3_moe")


@pytest.fixture(scope="module")
def rtn(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Path:
    return run(source, tmp_path_factory.mktemp("rtn") / "out").path


@pytest.fixture(scope="module")
def mse(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Path:
    return run(source, tmp_path_factory.mktemp("mse") / "out", method="mse").path


def lines(artifact: Path) -> list[Line]:
    return [json.loads(line) for line in (artifact / "tensors.jsonl").read_text().splitlines()]


def rounded(artifact: Path) -> dict[str, float]:
    found = {line["name"]: line["decode"].get("relative_error") for line in lines(artifact)}
    return {name: error for name, error in found.items() if error is not None}


def edited(artifact: Path, target: Path, edit: Callable[[Line], Line | None]) -> Path:
    """A copy of an artifact whose records are others and in its manifest; its tensors do not matter here."""
    target.mkdir()
    kept = [new for line in lines(artifact) if (new := edit(line)) is not None]
    content = "".join(json.dumps(line) + "\n" for line in kept).encode()
    (target / "tensors.jsonl").write_bytes(content)
    manifest = json.loads((artifact / "manifest.json").read_text())
    manifest["files"]["tensors.jsonl"] = {"nbytes": len(content), "sha256": sha256(content).hexdigest()}
    (target / "manifest.json").write_text(json.dumps(manifest))
    return target


def calibrated(gains: dict[str, float], **more: Any) -> Callable[[Line], Line]:
    def edit(line: Line) -> Line:
        part = line["name"].split(".")[-2]
        if "relative_error" in line["decode"]:
            facts = {
                "tokens": 300, "shrunk": False, "form": "dense", "percdamp": 0.01, "attempts": 1,
                "rows_from_floor": 0, "error_to_rtn": gains[part], "weight_error_to_rtn": 1.5,
            }  # fmt: skip
            line["decode"] |= {"method": "gptq", "calibration": facts, **more}
        return line

    return edit


def test_figures_are_the_ones_of_the_records(rtn: Path, mse: Path) -> None:
    a, b = rounded(rtn), rounded(mse)
    found = api.compare(rtn, mse)
    assert found.total.weights == len(a) == len(b) > 0
    assert found.total.better + found.total.worse <= len(a) and found.total.better == sum(b[n] < a[n] for n in a)
    rms = [np.sqrt(np.mean(np.square([side[n] for n in a]))) for side in (a, b)]
    assert found.total.error_a == pytest.approx(rms[0], rel=1e-5)
    assert found.total.ratio == pytest.approx(rms[1] / rms[0], rel=1e-5)
    assert sum(g.weights for g in found.groups) == sum(g.weights for g in found.projections) == len(a)
    for group in found.groups:
        mine = [n for n in a if f".layers.{group.layer}." in n and f".{group.projection}." in n]
        assert group.weights == len(mine) and group.worse == sum(b[n] > a[n] for n in mine)
        assert group.error_b == pytest.approx(np.sqrt(np.mean([b[n] ** 2 for n in mine])), rel=1e-5)
    assert json.dumps(found.to_json()) and (found.a.method, found.b.method) == ("rtn", "mse")


def test_an_artifact_against_itself(rtn: Path) -> None:
    total = api.compare(rtn, rtn).total
    assert (total.ratio, total.better, total.worse, total.only_a, total.only_b) == (1.0, 0, 0, 0, 0)
    assert (total.output_a, total.output_better, total.output_worse) == (1.0, 0, 0)


def test_output_errors_of_calibrated_weights(rtn: Path, tmp_path: Path) -> None:
    gains = {"gate_proj": 0.2, "up_proj": 0.4, "down_proj": 1.0}
    gptq = edited(rtn, tmp_path / "gptq", calibrated(gains))
    found = {g.projection: g for g in api.compare(rtn, gptq).projections}
    for part, gain in gains.items():
        group = found[part]
        assert (group.output_a, group.output_b) == (1.0, gain)
        assert (group.output_better, group.output_worse) == (group.weights if gain < 1 else 0, 0)
    back = api.compare(gptq, rtn).total
    assert (back.output_a, back.output_b, back.output_better) == (0.4, 1.0, 0)
    assert back.output_worse == back.weights * 2 // 3


def test_output_errors_of_other_groups_are_not_compared(rtn: Path, tmp_path: Path) -> None:
    gains = dict.fromkeys(("gate_proj", "up_proj", "down_proj"), 0.5)
    other = edited(rtn, tmp_path / "other", calibrated(gains, group_size=128))
    total = api.compare(rtn, other).total
    assert (total.output_b, total.output_better, total.output_worse) == (0.5, 0, 0)


def test_weights_that_one_side_kept_are_counted_apart(rtn: Path, tmp_path: Path) -> None:
    def keep_up(line: Line) -> Line:
        if ".up_proj." in line["name"]:
            line["decode"] = {"action": "keep"}
        return line

    kept = edited(rtn, tmp_path / "kept", keep_up)
    found = {g.projection: g for g in api.compare(rtn, kept).projections}
    assert found["up_proj"].weights == 0 and found["up_proj"].ratio is None and found["up_proj"].only_a > 0
    assert found["down_proj"].only_a == found["down_proj"].only_b == 0
    assert api.compare(kept, rtn).total.only_b == found["up_proj"].only_a


def test_another_source_is_refused(rtn: Path, tmp_path: Path) -> None:
    from quantkit.artifact import Artifact

    other = run("tiny-qwen3", tmp_path / "other").path
    with pytest.raises(UsageError) as refused:
        api.compare(rtn, other)
    roots = [Artifact.open(path).manifest.source.tensor_root[:16] for path in (rtn, other)]
    assert all(root in str(refused.value) for root in roots) and "diff" in (refused.value.hint or "")


def test_a_missing_record_is_no_silence(rtn: Path, tmp_path: Path) -> None:
    name = next(iter(rounded(rtn)))
    torn = edited(rtn, tmp_path / "torn", lambda line: None if line["name"] == name else line)
    with pytest.raises(ArtifactError, match="no record of"):
        api.compare(rtn, torn)


@pytest.mark.parametrize("damage", ["emptied", "a line less", "a digit", "not in the manifest"])
def test_records_that_are_not_the_manifests(rtn: Path, tmp_path: Path, damage: str) -> None:
    """Every line of what is left may be sound: nothing is reported of it."""
    copy = edited(rtn, tmp_path / "copy", lambda line: line)
    path = copy / "tensors.jsonl"
    content = path.read_bytes()
    if damage == "not in the manifest":
        manifest = json.loads((copy / "manifest.json").read_text())
        del manifest["files"]["tensors.jsonl"]
        (copy / "manifest.json").write_text(json.dumps(manifest))
    less = content[content.index(b"\n") + 1 :]
    digit = content.replace(b'"relative_error": 0.', b'"relative_error": 1.', 1)
    assert len(digit) == len(content) and digit != content
    path.write_bytes({"emptied": b"", "a line less": less, "a digit": digit}.get(damage, content))
    for call in (lambda: api.report(copy), lambda: api.compare(rtn, copy), lambda: api.compare(copy, rtn)):
        with pytest.raises(ArtifactError, match="manifest") as refused:
            call()
        assert refused.value.exit_code == 3 and "verify" in (refused.value.hint or "")


def test_report_is_the_attached_one(mse: Path) -> None:
    assert api.report(mse) == json.loads((mse / "attachments" / "report.json").read_text())
    assert "calibration" not in api.report(mse) and "exceptions" not in api.report(mse)
