"""The quality budget: kept layers, failures, retries; the same bytes for any workers and after any crash.

The oracle of an amended layer is a conversion whose recipe leaves that layer out.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.artifact import Artifact, verify_artifact
from quantkit.artifact.journal import Journal
from quantkit.artifact.layout import JOURNAL
from quantkit.artifact.records import read_records
from quantkit.artifact.shard import ShardWriter
from quantkit.calibration.stream import Stream
from quantkit.cli import show_report
from quantkit.convert.shards import ShardState
from quantkit.errors import GateFailed, RecipeError
from tests.builders import write_moe
from tests.quantkit.convert import cases, test_calibrated
from tests.quantkit.convert.cases import core_digests, errors_of
from tests.quantkit.convert.test_calibrated import crash, stop_in

ROOT = Path(__file__).parents[3]
# Between the largest error of layer 1 of tiny-glm and those of the other layers, by mse and by rtn.
MSE_LIMIT, RTN_LIMIT = 0.089, 0.0985
KEEP = {"max_relative_error": MSE_LIMIT, "action": "keep-fp8"}
GPTQ_KEEP = {"max_relative_error": 0.118, "action": "keep-fp8"}
SMALL = {"samples": 4, "length": 32, "layers": "1-2"}
LAYER = "model-layer-00001.safetensors"


def mse(out: Path, **options: Any) -> Artifact:
    return cases.run("tiny-glm", out, **({"method": "mse"} | options))


def gptq(out: Path, **options: Any) -> Artifact:
    return test_calibrated.run("tiny-glm", out, **(SMALL | options))


def decode_view(artifact: Path) -> dict[str, str]:
    """Digests of the decode view but for the mark, which names the recipe's pair."""
    return {
        name: sha256 for name, sha256 in core_digests(artifact).items()
        if name.startswith("decode/") and not name.endswith("quantkit_view.json")
    }  # fmt: skip


@pytest.fixture(scope="module")
def amended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("mse") / "artifact"
    mse(out, jobs=1, budget=KEEP)
    return out


@pytest.fixture(scope="module")
def amended_gptq(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gptq") / "artifact"
    gptq(out, jobs=1, budget=GPTQ_KEEP)
    return out


def test_a_layer_over_the_limit_is_as_if_the_recipe_left_it_out(amended: Path, tmp_path: Path) -> None:
    mse(tmp_path / "without", layers="2-5")
    assert decode_view(amended) == decode_view(tmp_path / "without")
    (found,) = Artifact.open(amended).manifest.plan_amendments
    mse(tmp_path / "all")
    errors = {r.name: r.decode.relative_error or 0 for r in read_records(tmp_path / "all") if r.layer == 1}
    over = {name: error for name, error in errors.items() if error > MSE_LIMIT}
    assert 0 < len(over) < 48 and max(errors_of(tmp_path / "all", 2)) <= MSE_LIMIT
    assert found.layer == 1 and (found.over_limit, found.weights) == (len(over), 48)
    assert over[found.worst.tensor] == max(over.values()) == found.worst.relative_error


def test_amended_artifact_verifies_and_says_why(amended: Path) -> None:
    report = verify_artifact(amended)
    assert report.ok, report.problems
    assert any("192 quantized weights are within" in c.detail for c in report.checks if c.name == "budget")
    kept = [record for record in read_records(amended) if record.reason == "quality budget"]
    assert len(kept) == 2 * 48 and {record.layer for record in kept} == {1}
    assert {record.decode.action for record in kept} == {"keep", "rename"}
    shown = json.loads((amended / "attachments" / "report.json").read_text())["amendments"]
    assert [a["layer"] for a in shown] == [1]
    assert "Kept unquantized by the quality budget: layers 1." in (amended / "README.md").read_text()
    assert "Layers kept by the quality budget: 1" in (amended / "attachments" / "report.html").read_text()


@pytest.mark.parametrize("jobs", [2, 5])
def test_workers_change_no_byte(jobs: int, amended: Path, tmp_path: Path) -> None:
    mse(tmp_path / "out", jobs=jobs, budget=KEEP)
    assert core_digests(tmp_path / "out") == core_digests(amended)


def test_workers_change_no_byte_of_a_calibrated_one(amended_gptq: Path, tmp_path: Path) -> None:
    gptq(tmp_path / "out", jobs=5, budget=GPTQ_KEEP)
    assert core_digests(tmp_path / "out") == core_digests(amended_gptq)


def test_calibration_goes_on_from_the_layers_own_weights(amended_gptq: Path, tmp_path: Path) -> None:
    assert verify_artifact(amended_gptq).ok
    assert [a.layer for a in Artifact.open(amended_gptq).manifest.plan_amendments] == [1]
    gptq(tmp_path / "without", layers="2")
    assert decode_view(amended_gptq) == decode_view(tmp_path / "without")


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("glm_moe_dsa", {"rest": "bf16", "max_shard_size": "300kB"}),
        ("glm_moe_dsa", {"linears": "all", "mtp": "quantize"}),
        ("minimax_m2", {}),
        ("qwen3_moe", {"storage": "bf16", "make_fp8": True}),
        ("qwen3_moe", {"storage": "bf16", "make_fp8": True, "rest": "bf16"}),
    ],
)
def test_other_sources_and_rests(source: str, options: dict[str, Any], tmp_path: Path) -> None:
    """The limit lies just under the largest error there is, so that its layer goes and others stay."""
    storage = options.pop("storage", None)
    model = write_moe(tmp_path / "model", source, storage=storage, layers=4)
    cases.run(model, tmp_path / "all", **options)
    worst = max(
        (r for r in read_records(tmp_path / "all") if r.role == "routed_expert" and r.decode.method),
        key=lambda r: r.decode.relative_error or 0,
    )
    assert worst.decode.relative_error is not None
    budget = {"max_relative_error": worst.decode.relative_error - 2e-6, "action": "keep-fp8"}
    cases.run(model, tmp_path / "out", budget=budget, **options)
    (found,) = Artifact.open(tmp_path / "out").manifest.plan_amendments
    assert (found.layer, found.worst.tensor) == (worst.layer, worst.name)
    problems = verify_artifact(tmp_path / "out", against=model).problems
    # No engine cuts the blocks of one of these small models.
    assert not [p for p in problems if p.name != "engines of decode"]
    quantized = {r.layer for r in read_records(tmp_path / "out") if r.decode.action == "quantize"}
    assert quantized and found.layer not in quantized


def test_attention_and_shared_experts_of_the_layer_go_too(tmp_path: Path) -> None:
    """They were calibrated before the experts were; what comes after must see nothing of it."""
    artifact = gptq(tmp_path / "out", linears="all", budget=GPTQ_KEEP)
    assert [a.layer for a in artifact.manifest.plan_amendments] == [1]
    assert verify_artifact(tmp_path / "out").ok
    gptq(tmp_path / "without", linears="all", layers="2")
    assert decode_view(tmp_path / "out") == decode_view(tmp_path / "without")


def test_a_layer_of_two_methods_is_judged_when_both_are_done(tmp_path: Path) -> None:
    options = {"overrides": [{"pattern": "down_proj", "method": "mse"}]}
    budget = {"max_relative_error": {"down": MSE_LIMIT}, "action": "keep-fp8"}
    artifact = gptq(tmp_path / "out", budget=budget, **options)
    assert [(a.layer, a.weights) for a in artifact.manifest.plan_amendments] == [(1, 16)]
    assert verify_artifact(tmp_path / "out").ok
    gptq(tmp_path / "without", **options, layers="2")
    assert decode_view(tmp_path / "out") == decode_view(tmp_path / "without")


def test_limits_by_projection(tmp_path: Path) -> None:
    artifact = mse(
        tmp_path / "out", budget={"max_relative_error": {"gate": MSE_LIMIT - 0.0005}, "action": "keep-fp8"}
    )
    (found,) = artifact.manifest.plan_amendments
    assert found.layer == 1 and found.weights == 16 and "gate_proj" in found.worst.tensor
    assert verify_artifact(tmp_path / "out").ok


def test_no_layer_left_is_an_error(tmp_path: Path) -> None:
    for _ in range(2):  # a second run comes to the same end
        with pytest.raises(GateFailed, match=r"layers 1-5\): nothing would be INT4"):
            mse(tmp_path / "out", budget={"max_relative_error": 0.01, "action": "keep-fp8"})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("run", [mse, gptq])
def test_fail_names_the_weight_and_fails_again_without_computing(
    run: Callable[..., Artifact],
    amended: Path,
    amended_gptq: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, budget = (amended, KEEP) if run is mse else (amended_gptq, GPTQ_KEEP)
    worst = Artifact.open(whole).manifest.plan_amendments[0].worst
    with pytest.raises(GateFailed) as caught:
        run(tmp_path / "out", budget=budget | {"action": "fail"})
    assert caught.value.where == worst.tensor and caught.value.exit_code == 1
    assert f"{worst.relative_error:g} is over its limit {worst.limit:g}" in caught.value.what
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial" / "decode" / LAYER).exists()
    monkeypatch.setattr("quantkit.convert.quality.run_job", None)
    monkeypatch.setattr(Stream, "forward", None)
    with pytest.raises(GateFailed) as again:
        run(tmp_path / "out", budget=budget | {"action": "fail"})
    assert str(again.value) == str(caught.value)


def check_report_of_retries(artifact: Path, *, calibrated: bool) -> list[str]:
    """Nothing is retried without a line, in every form of the report; the names."""
    stored = json.loads((artifact / "attachments" / "report.json").read_text())
    (ways,) = stored["exceptions"]["retried"].values()
    ((way, names),) = ways.items()
    assert way == ("dampening" if calibrated else "mse") and len(names) == len(set(names)) > 0
    if calibrated:
        records = {r.name: r.decode.calibration or {} for r in read_records(artifact)}
        assert {name for name, facts in records.items() if "retry" in facts} == set(names)
        dampened = {e["tensor"]: e["percdamp"] for e in stored["exceptions"]["dampened"]}
        assert dampened == {name: records[name]["percdamp"] for name in names}
    page = (artifact / "attachments" / "report.html").read_text()
    assert f"Retried under the quality budget: {len(names)} weights" in page
    assert f"<code>{names[0]} ({way})</code>" in page
    text = "\n".join(map(str, show_report.conversion("x", stored)))
    assert f"retried    {len(names)} weights under the quality budget: {len(names)} " in text
    assert f"layer 1: {len(names)}: {names[0].partition('.layers.1.')[2]}" in text
    return names


def test_rtn_is_tried_again_by_mse(tmp_path: Path) -> None:
    mse(tmp_path / "rtn", method="rtn")
    mse(tmp_path / "mse")
    mse(tmp_path / "out", method="rtn", budget={"max_relative_error": RTN_LIMIT, "action": "retry"})
    assert verify_artifact(tmp_path / "out").ok
    ours, first, second = (
        {r.name: r.decode for r in read_records(tmp_path / name) if r.decode.method}
        for name in ("out", "rtn", "mse")
    )
    tried = {name for name, outcome in first.items() if (outcome.relative_error or 0) > RTN_LIMIT}
    assert tried
    for name, outcome in ours.items():
        assert outcome == (second if name in tried else first)[name]
    assert set(check_report_of_retries(tmp_path / "out", calibrated=False)) == tried
    assert "exceptions" not in json.loads((tmp_path / "rtn" / "attachments" / "report.json").read_text())


def test_mse_has_nothing_to_try(tmp_path: Path) -> None:
    with pytest.raises(GateFailed, match="after retries"):
        mse(tmp_path / "out", budget=KEEP | {"action": "retry"})
    artifact = mse(tmp_path / "kept", budget=KEEP | {"action": ["retry", "keep-fp8"]})
    assert [a.layer for a in artifact.manifest.plan_amendments] == [1]


def test_gptq_is_tried_again_with_more_dampening_and_by_mse(amended_gptq: Path, tmp_path: Path) -> None:
    gptq(tmp_path / "first", layers="1")
    gptq(tmp_path / "mse", layers="1", budget={"max_relative_error": 0.0905, "action": "retry"})
    gptq(tmp_path / "out", layers="1", budget={"max_relative_error": 0.12, "action": "retry"})
    for name, limit in (("mse", 0.0905), ("out", 0.12)):
        assert verify_artifact(tmp_path / name).ok
        assert max(errors_of(tmp_path / name)) <= limit
    before = {r.name: r.decode for r in read_records(tmp_path / "first") if r.decode.calibration}
    for record in test_calibrated.calibrated(tmp_path / "out"):
        facts, first = record.decode.calibration, before[record.name]
        assert facts is not None and first.calibration is not None
        if (first.relative_error or 0) <= 0.12:
            assert "retry" not in facts
        else:
            assert facts["retry"] == "dampening"
            assert facts["percdamp"] == pytest.approx(10 * first.calibration["percdamp"])
    check_report_of_retries(tmp_path / "out", calibrated=True)
    mse(tmp_path / "plain", layers="1")
    plain = {r.name: r.decode.outputs for r in read_records(tmp_path / "plain") if r.decode.method}
    tried = [
        r for r in test_calibrated.calibrated(tmp_path / "mse") if (r.decode.calibration or {})["retry"] == "mse"
    ]
    assert tried and all(plain[r.name] == r.decode.outputs for r in tried)


def test_what_a_budget_can_not_be(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no limit is given"):
        mse(tmp_path / "out", budget={"max_relative_error": {}})
    with pytest.raises(RecipeError, match="applies to no weight"):
        mse(tmp_path / "out", budget=KEEP, linears="all-mlp", keep=(r"\.experts\.",))


# crashes

DIED = RuntimeError("died")


def die(*_: Any, **__: Any) -> None:
    raise DIED


def at_journal(monkeypatch: pytest.MonkeyPatch, *, before: bool) -> None:
    """Die before or after the line of the amendment."""
    real = Journal.append

    def append(self: Journal, entry: dict[str, Any]) -> None:
        if entry["kind"] != "amendment" or not before:
            real(self, entry)
        if entry["kind"] == "amendment":
            raise DIED

    monkeypatch.setattr(Journal, "append", append)


def amended_file_begun(monkeypatch: pytest.MonkeyPatch, jobs: int) -> None:
    """Die when so many jobs of the amended layer's file are done and journalled."""
    real = ShardState.done

    def done(self: ShardState, index: int, result: Any) -> None:
        real(self, index, result)
        if self.shard.file == LAYER and not self.is_held and len(self.results) == jobs:
            self.flush()
            raise DIED

    monkeypatch.setattr(ShardState, "done", done)


def at_removal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShardState, "remove", die)


def at_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    """Die when the amended file is written and not yet final."""
    real = ShardWriter.finish

    def finish(self: ShardWriter) -> Any:
        if self.path.name == LAYER:
            raise DIED
        return real(self)

    monkeypatch.setattr(ShardWriter, "finish", finish)


STAGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "before the line": lambda patch: at_journal(patch, before=True),
    "after the line": lambda patch: at_journal(patch, before=False),
    "old file still there": at_removal,
    "amended file begun": lambda patch: amended_file_begun(patch, 60),
    "amended file complete": at_finish,
}


@pytest.mark.parametrize(
    ("stage", "run"), [*((s, mse) for s in STAGES), *((s, gptq) for s in ("before the line", "after the line"))]
)
def test_crash_at_any_stage_changes_no_byte(
    stage: str, run: Callable[..., Artifact], amended: Path, amended_gptq: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    whole, budget = (amended, KEEP) if run is mse else (amended_gptq, GPTQ_KEEP)
    with monkeypatch.context() as patch:
        STAGES[stage](patch)
        with pytest.raises(RuntimeError, match="died"):
            run(tmp_path / "out", budget=budget)
    work = tmp_path / "out.partial"
    assert not (work / "decode" / LAYER).exists()
    lines = [json.loads(line)["kind"] for line in (work / JOURNAL).read_text().splitlines()]
    assert lines.count("amendment") == (stage != "before the line")
    run(tmp_path / "out", budget=budget)
    assert core_digests(tmp_path / "out") == core_digests(whole)


def test_kill_at_any_point(tmp_path: Path) -> None:
    source = write_moe(tmp_path / "model", "glm_moe_dsa", layers=4)
    cases.run(source, tmp_path / "all", method="mse")
    budget = {"max_relative_error": max(errors_of(tmp_path / "all")) - 2e-6, "action": ["retry", "keep-fp8"]}
    driver = [sys.executable, "-m", "tests.quantkit.convert.crash_driver", source, tmp_path]
    done = subprocess.run(
        [*driver, "3", "10", "0", json.dumps({"budget": budget, "method": "mse"})],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (_, _, undisturbed), *results = json.loads(done.stdout)
    assert len(Artifact.open(tmp_path / "whole").manifest.plan_amendments) == 1
    assert sum(kills > 0 for _, kills, _ in results) > 6
    for what, _, digests in results:
        assert digests == undisturbed, what


def test_folds_of_the_layer_go_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a run that died before it could remove them."""
    budget = {"max_relative_error": 0.105, "action": "keep-fp8"}
    with monkeypatch.context() as patch:
        at_removal(patch)
        with pytest.raises(RuntimeError, match="died"):
            gptq(tmp_path / "out", method="awq", budget=budget)
    assert (tmp_path / "out.partial" / "folds" / f"{LAYER}.unfinished").exists()
    artifact = gptq(tmp_path / "out", method="awq", budget=budget)
    assert [a.layer for a in artifact.manifest.plan_amendments] == [1]
    assert verify_artifact(tmp_path / "out").ok
    gptq(tmp_path / "without", method="awq", layers="2")
    assert decode_view(tmp_path / "out") == decode_view(tmp_path / "without")
    folds = [sorted((tmp_path / name / "folds").iterdir()) for name in ("out", "without")]
    assert [p.name for p in folds[0]] == [p.name for p in folds[1]] == ["model-layer-00002.safetensors"]
    assert folds[0][0].read_bytes() == folds[1][0].read_bytes()


def test_crash_in_the_calibrated_layer_after_an_amendment(amended_gptq: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="crash"):
        gptq(tmp_path / "out", budget=GPTQ_KEEP, on_progress=stop_in(2, 20, crash))
    gptq(tmp_path / "out", budget=GPTQ_KEEP)
    assert core_digests(tmp_path / "out") == core_digests(amended_gptq)
