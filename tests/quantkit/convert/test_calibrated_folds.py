"""Conversions that fold: bytes, resumption, what is recorded, the prefill view untouched, the weights unfolded."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quantkit
from quantkit.artifact import Artifact, verify_artifact
from quantkit.artifact.records import read_records
from quantkit.checkpoint import open_checkpoint
from quantkit.plan import build_plan
from quantkit.recipe import default_recipe
from tests.builders import write_moe
from tests.quantkit.convert.cases import core_digests, plan_of
from tests.quantkit.convert.test_calibrated import ROOT, SMALL, calibrated, crash, run, samples_of, stop_in

FOLDING: dict[str, Any] = {"method": "gptq+awq", **SMALL, "layers": "1-2"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-glm, undisturbed, by one worker."""
    out = tmp_path_factory.mktemp("whole") / "artifact"
    run("tiny-glm", out, jobs=1, **FOLDING)
    return out


def test_artifact_verifies_and_says_what_was_folded(whole: Path) -> None:
    assert verify_artifact(whole, against="tiny-glm").ok
    manifest = Artifact.open(whole).manifest
    assert manifest.format_version == 2
    assert sorted(p.name for p in (whole / "folds").iterdir()) == [
        f"model-layer-{layer:05d}.safetensors" for layer in (1, 2)
    ]
    records = calibrated(whole)
    assert len(records) == 2 * 16 * 3
    for record in records:
        facts, fold = record.decode.calibration, record.decode.fold
        assert facts is not None and record.decode.method == "gptq+awq" and facts["form"] != "diagonal"
        assert facts["weight_error_to_rtn"] > 0
        if ".gate_proj." in record.name:
            assert fold is None and "fold_alpha" not in facts
        else:
            assert fold is not None and 0 <= facts["fold_alpha"] <= 1
            up = record.name.replace(".down_proj.", ".up_proj.").removesuffix(".weight")
            assert (fold.tensor, fold.axis) == (f"{up}.awq_scale", int(".down_proj." in record.name))
    assert any((r.decode.calibration or {}).get("fold_alpha", 0) > 0 for r in records)


def test_prefill_view_is_the_publishers(whole: Path) -> None:
    with open_checkpoint("tiny-glm") as source:
        for file in source.files:
            path = source.local_path(file)
            assert path is not None and (whole / "prefill" / file).read_bytes() == path.read_bytes()


def test_decode_view_holds_nothing_but_a_checkpoint(whole: Path) -> None:
    """Engines see the names that they see without a fold."""
    plain, folding = (plan_of("tiny-glm", **{**FOLDING, "method": method}) for method in ("gptq", "gptq+awq"))
    assert {t.name for job in plain.jobs("decode") for t in job.outputs} == set(
        Artifact.open(whole).decode.tensors.tensors
    )
    assert plain.decode_config == folding.decode_config and not plain.folds
    assert plain.disk.other < folding.disk.other and plain.plan_id != folding.plan_id


def test_unfolded_weights_are_near_the_source_and_folded_ones_are_not(whole: Path) -> None:
    with Artifact.open(whole) as artifact:
        apart = 0
        for record in calibrated(whole):
            module = record.name.removesuffix(".weight")
            exact, weight = artifact.prefill[module].dequantize(), artifact.decode[module]
            stored, back = (
                np.linalg.norm(w - exact) / np.linalg.norm(exact) for w in (weight.dequantize(), weight.unfolded())
            )
            assert back < 0.5
            assert stored == back or record.decode.fold is not None
            apart += stored > 1.2 * back
        assert apart > 10  # the fold is real
        assert np.array_equal(artifact.prefill[module].unfolded(), exact)


def test_experts_compute_the_same_with_the_fold_or_without(whole: Path) -> None:
    """Without rounding: the source's up and down, folded by the recorded scale, against themselves."""
    from quantkit.artifact.folds import folded

    def compute(x: np.ndarray, w: dict[str, np.ndarray]) -> np.ndarray:
        gate, up, down = (w[p].astype(np.float64) for p in ("gate", "up", "down"))
        result: np.ndarray = (x @ gate.T / (1 + np.exp(-x @ gate.T)) * (x @ up.T)) @ down.T
        return result

    x = np.random.default_rng(0).standard_normal((20, 256))
    with Artifact.open(whole) as artifact:
        assert artifact.folds is not None
        for expert in range(16):
            parts = {p: f"model.layers.2.mlp.experts.{expert}.{p}_proj" for p in ("gate", "up", "down")}
            before = {p: artifact.prefill[module].dequantize() for p, module in parts.items()}
            after = dict(before)
            for p in ("up", "down"):
                fold = artifact.folds.by_module[parts[p]]
                after[p] = folded(before[p], artifact.folds.scale(fold), fold)
            y, z = (compute(x, w) for w in (before, after))
            assert np.linalg.norm(y - z) < 1e-6 * np.linalg.norm(y)


@pytest.mark.parametrize("jobs", [3])
def test_workers_change_no_byte(jobs: int, whole: Path, tmp_path: Path) -> None:
    run("tiny-glm", tmp_path / "out", jobs=jobs, **FOLDING)
    assert core_digests(tmp_path / "out") == core_digests(whole)


def test_killed_run_resumes_with_the_same_bytes(whole: Path, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from tests.quantkit.convert.test_calibrated_folds import FOLDING, run, stop_in\n"
        "die = lambda: os.kill(os.getpid(), signal.SIGKILL)\n"
        "run('tiny-glm', Path(sys.argv[1]), jobs=1, on_progress=stop_in(2, 30, die), **FOLDING)\n"
    )
    child = subprocess.run([sys.executable, "-c", code, tmp_path / "out"], cwd=ROOT, timeout=100)
    assert child.returncode == -signal.SIGKILL
    run("tiny-glm", tmp_path / "out", **FOLDING)
    assert core_digests(tmp_path / "out") == core_digests(whole)


def test_lost_folds_are_made_again(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="crash"):
        run("tiny-glm", tmp_path / "out", on_progress=stop_in(2, 5, crash), **FOLDING)
    (tmp_path / "out.partial" / "folds" / "model-layer-00001.safetensors").unlink()
    run("tiny-glm", tmp_path / "out", **FOLDING)
    assert core_digests(tmp_path / "out") == core_digests(whole)


def test_overrides_choose_who_is_folded(tmp_path: Path) -> None:
    overrides = [{"pattern": r"layers\.1\..*experts\.(1|2)\.(up|down)", "method": "awq"}]
    run("tiny-glm", tmp_path / "out", **SMALL, layers="1-2", overrides=overrides)
    assert verify_artifact(tmp_path / "out").ok
    records = calibrated(tmp_path / "out")
    assert {(r.layer, r.expert) for r in records if r.decode.fold} == {(1, 1), (1, 2)}
    assert {r.decode.method for r in records if r.decode.fold} == {"awq"}
    assert [p.name for p in (tmp_path / "out" / "folds").iterdir()] == ["model-layer-00001.safetensors"]


def test_an_amended_layer_loses_its_folds(tmp_path: Path) -> None:
    source, options = write_moe(tmp_path / "source", "qwen3_moe"), {"given": samples_of(2, 40), "method": "awq"}
    free = run(source, tmp_path / "free", **options)
    worst = {n: max(r.decode.relative_error or 0 for r in calibrated(free.path) if r.layer == n) for n in (0, 1)}
    kept, other = sorted(worst, key=lambda n: -worst[n])
    budget = {"max_relative_error": (worst[kept] + worst[other]) / 2, "action": "keep-fp8"}
    some = run(source, tmp_path / "some", **options, budget=budget)
    assert {c.name for c in verify_artifact(some.path).problems} <= {"engines of decode"}
    assert some.manifest.format_version == 2
    assert {r.layer for r in read_records(some.path) if r.decode.fold} == {other}
    assert [p.name for p in (some.path / "folds").iterdir()] == [f"model-layer-{other:05d}.safetensors"]
    overrides = [{"pattern": rf"layers\.{other}\.", "method": "rtn"}]
    limits = {"max_relative_error": {"down": worst[kept] / 100}, "action": "keep-fp8"}
    keep = [rf"layers\.{other}\..*down"]
    none = run(source, tmp_path / "none", **options, budget=limits, overrides=overrides, keep=keep)
    assert {c.name for c in verify_artifact(none.path).problems} <= {"engines of decode"}
    assert none.manifest.format_version == 1
    assert not (none.path / "folds").exists() and none.manifest.plan_amendments


def test_plain_source_whose_fp8_is_derived(tmp_path: Path) -> None:
    source = write_moe(tmp_path / "source", "qwen3_moe", storage="bf16")
    for given, name in ((samples_of(1, 3), "few"), (samples_of(4, 40), "more")):
        run(source, tmp_path / name, given=given, make_fp8=True, method="awq")
        assert verify_artifact(tmp_path / name).ok
        assert {(r.decode.calibration or {})["form"] for r in calibrated(tmp_path / name)} <= {"diagonal", "none"}


def test_no_fold_leaves_everything_as_it_was() -> None:
    with open_checkpoint("tiny-glm") as checkpoint:
        plan = build_plan(checkpoint, default_recipe().with_options(method="gptq", **SMALL))
    assert plan.folds == () and "folds" not in plan.summary()["files"]


def test_differences_are_those_of_the_unfolded_weights(whole: Path) -> None:
    errors = {c.name: c.relative_error for c in quantkit.diff(whole / "prefill", whole).changes}
    assert len(errors) == 2 * 16 * 3 and all(e is not None and e < 0.5 for e in errors.values())
    assert errors == {c.name: c.relative_error for c in quantkit.diff(whole / "prefill", whole / "decode").changes}
    assert not quantkit.diff(whole, whole).changes
