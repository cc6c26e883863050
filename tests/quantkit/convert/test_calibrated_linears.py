"""Conversions that calibrate linears outside the experts: every family, workers, resumption, what is refused."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quantkit.artifact import verify_artifact
from quantkit.calibration import Hessian, gptq
from quantkit.errors import EnvironmentProblem
from quantkit.plan.memory import resident_bytes
from tests.builders import moe, write_checkpoint, write_moe
from tests.quantkit.convert.cases import core_digests
from tests.quantkit.convert.test_calibrated import ROOT, calibrated, crash, run, samples_of, stop_in

SMALL: dict[str, Any] = {"samples": 6, "length": 64, "linears": "all", "layers": "0-1"}  # dense, then sparse
FAMILIES = (
    "glm_moe_dsa", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "qwen3_moe", "glm4_moe", "minimax_m2",
    "mixtral",
)  # fmt: skip
MLA = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"}
GQA = {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of tiny-glm, undisturbed, by one worker."""
    out = tmp_path_factory.mktemp("whole") / "artifact"
    run("tiny-glm", out, jobs=1, **SMALL)
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    tensors, config = moe(family, storage="fp8-block" if family == "kimi_k25" else None)
    config |= {"use_qk_norm": True, "attention_bias": True} if family == "glm4_moe" else {}
    source = write_checkpoint(tmp_path / "source", tensors, config)
    run(source, tmp_path / "out", given=samples_of(2, 40), linears="all")
    assert verify_artifact(tmp_path / "out").ok
    records = [r for r in calibrated(tmp_path / "out") if r.expert is None]
    attention = {r.name.split(".")[-2] for r in records if ".self_attn." in r.name}
    assert attention == (MLA if "q_a_proj" in attention else GQA) and {r.layer for r in records} == {0, 1}
    has_mlp = family not in ("qwen3_moe", "minimax_m2", "mixtral")
    assert len(records) == 2 * 4 + (2 * 3 if has_mlp else 0)
    for record in records:
        facts = record.decode.calibration
        assert facts is not None and facts["tokens"] == 80 and facts["shrunk"] is False
        assert facts["error_to_rtn"] <= 1 and record.decode.method == "gptq"


@pytest.mark.parametrize(("method", "forms"), [("awq", {"diagonal"}), ("gptq+awq", {"dense", "low-rank"})])
def test_nothing_is_folded_outside_the_experts(method: str, forms: set[str], tmp_path: Path) -> None:
    source = write_moe(tmp_path / "source", "deepseek_v3")
    run(source, tmp_path / "out", given=samples_of(2, 40), linears="all", method=method)
    assert verify_artifact(tmp_path / "out").ok
    records = [r for r in calibrated(tmp_path / "out") if r.expert is None]
    assert len(records) == 2 * 4 + 2 * 3
    for record in records:
        facts = record.decode.calibration
        assert facts is not None and record.decode.method == method and facts["form"] in forms


def test_workers_change_no_byte(whole: Path, tmp_path: Path) -> None:
    run("tiny-glm", tmp_path / "out", jobs=3, **SMALL)
    assert core_digests(tmp_path / "out") == core_digests(whole)
    assert verify_artifact(whole).ok


@pytest.mark.parametrize(("layer", "weights", "left"), [(0, 4, 7 - 4), (1, 12, 0)])
def test_stopped_run_keeps_finished_linears(
    layer: int, weights: int, left: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the stages: after o_proj, the fourth, the dense MLP is left; later, only experts are."""
    with pytest.raises(RuntimeError, match="crash"):
        run("tiny-glm", tmp_path / "out", on_progress=stop_in(layer, weights, crash), **SMALL)
    made: list[str] = []

    def quantize(weights: Any, hessian: Hessian, settings: Any) -> Any:
        made.extend(hessian.where.split(", "))
        return gptq(weights, hessian, settings)

    monkeypatch.setattr("quantkit.calibration.linear.gptq", quantize)
    run("tiny-glm", tmp_path / "out", **SMALL)
    assert len([name for name in made if f"layers.{layer}." in name]) == left
    assert core_digests(tmp_path / "out") == core_digests(whole)


def test_killed_run_resumes_with_the_same_bytes(whole: Path, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from tests.quantkit.convert.test_calibrated import run, stop_in\n"
        "from tests.quantkit.convert.test_calibrated_linears import SMALL\n"
        "die = lambda: os.kill(os.getpid(), signal.SIGKILL)\n"
        "run('tiny-glm', Path(sys.argv[1]), on_progress=stop_in(1, 6, die), **SMALL)\n"
    )
    child = subprocess.run([sys.executable, "-c", code, tmp_path / "out"], cwd=ROOT, timeout=100)
    assert child.returncode == -signal.SIGKILL
    run("tiny-glm", tmp_path / "out", **SMALL)
    assert core_digests(tmp_path / "out") == core_digests(whole)


def test_layers_without_experts_are_calibrated_alone(whole: Path, tmp_path: Path) -> None:
    """And a pattern chooses; what a linear becomes does not depend on what comes after it in the layer."""
    options = {"samples": 6, "length": 64, "layers": "0", "linears": "all-mlp"}
    run("tiny-glm", tmp_path / "out", quantize=(r"layers\.0\.self_attn\.(q|kv)_a_proj",), **options)
    records = {r.name: r.decode.outputs for r in calibrated(tmp_path / "out")}
    assert len(records) == 3 + 2
    others = {r.name: r.decode.outputs for r in calibrated(whole)}
    name = "model.layers.0.self_attn.q_a_proj.weight"
    assert records[name] == others[name]


def test_what_goes_on_is_what_the_recipe_says(whole: Path, tmp_path: Path) -> None:
    """The experts of a later layer see other tokens only if the quantized linears before them make these."""
    routed = {"samples": 6, "length": 64, "layers": "1"}
    run("tiny-glm", tmp_path / "routed", **routed)
    run("tiny-glm", tmp_path / "original", propagate="original", **SMALL)
    of_routed, of_original, of_quantized = (
        {r.name: r.decode.outputs for r in calibrated(out) if r.expert is not None}
        for out in (tmp_path / "routed", tmp_path / "original", whole)
    )
    assert len(of_routed) == 16 * 3 and of_original == of_routed and of_quantized != of_routed


def test_memory_for_wide_linears_is_asked_for(tmp_path: Path) -> None:
    limit = resident_bytes() + (120 << 20)
    wide = {"linears": "all", "samples": 6, "length": 64, "jobs": 1, "max_memory": limit}
    tensors, config = moe("deepseek_v3", intermediate=2048)
    source = write_checkpoint(tmp_path / "source", tensors, config)
    with pytest.raises(EnvironmentProblem, match="not enough to calibrate"):
        run(source, tmp_path / "out", given=samples_of(2, 40), **wide)
