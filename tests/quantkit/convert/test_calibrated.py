"""Conversions with GPTQ: bytes, resumption, memory, what is recorded, what is refused, and what it is for."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantkit.artifact import Artifact, verify_artifact
from quantkit.artifact.records import TensorRecord, read_records
from quantkit.calibration.expert import calibrate_expert
from quantkit.calibration.samples import CalibrationSet, calibration_set
from quantkit.calibration.stream import Stream
from quantkit.checkpoint import open_checkpoint
from quantkit.cli import show_report
from quantkit.convert import convert
from quantkit.errors import ArtifactError, EnvironmentProblem, RecipeError, SourceError, UsageError
from quantkit.plan import build_plan
from quantkit.plan.memory import resident_bytes
from quantkit.recipe import default_recipe
from tests.builders import moe, write_checkpoint, write_moe
from tests.quantkit.convert.cases import core_digests, samples_of

ROOT = Path(__file__).parents[3]
SMALL: dict[str, Any] = {"samples": 8, "length": 64}
LAYERS = {"layers": "1-3"}  # of tiny-glm, whose layer 2 takes over layer 1's top-k


def run(
    source: str | Path, out: Path, *, given: CalibrationSet | None = None, jobs: int | None = None,
    max_memory: int | None = None, on_progress: Any = None, **options: Any,
) -> Artifact:  # fmt: skip
    options.setdefault("method", "gptq")
    recipe = default_recipe().with_options(**options)
    with open_checkpoint(source) as checkpoint:
        plan = build_plan(checkpoint, recipe)
        return convert(
            plan, checkpoint, out, jobs=jobs, max_memory=max_memory, calibration=given, on_progress=on_progress
        )


def calibrated(artifact: Path) -> list[TensorRecord]:
    return [record for record in read_records(artifact) if record.decode.calibration is not None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-glm, undisturbed, by one worker."""
    out = tmp_path_factory.mktemp("whole") / "artifact"
    run("tiny-glm", out, jobs=1, **SMALL, **LAYERS)
    return out


def test_places_are_refused_before_the_calibration_set_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("quantkit.convert.run._samples", never)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis").write_text("mine")
    for name, says in (
        ("full", "is not empty"),
        ("full/thesis", "is a file"),
        ("x.partial", "ends in"),
    ):
        with pytest.raises(UsageError, match=says):
            run("tiny-glm", tmp_path / name, **SMALL)


def test_artifact_verifies_and_says_how_it_was_calibrated(whole: Path) -> None:
    assert verify_artifact(whole).ok
    artifact = Artifact.open(whole)
    recipe = default_recipe().with_options(method="gptq", **SMALL)
    with open_checkpoint("tiny-glm") as checkpoint:
        assert recipe.calibration is not None
        assert artifact.manifest.calibration_sha256 == calibration_set(recipe.calibration, checkpoint).digest
    records = calibrated(whole)
    assert len(records) == 3 * 16 * 3 and {record.layer for record in records} == {1, 2, 3}
    for layer in (1, 2, 3):
        for part in ("gate_proj", "up_proj", "down_proj"):
            found = [r.decode.calibration for r in records if r.layer == layer and f".{part}." in r.name]
            assert sum(f["tokens"] for f in found if f) == 8 * 64 * 4  # every token goes to four experts
    for record in records:
        facts = record.decode.calibration
        assert facts is not None and record.decode.method == "gptq"
        assert facts["shrunk"] == (facts["tokens"] < 512) and 0.01 <= facts["percdamp"] <= 1
        assert facts["error_to_rtn"] <= 1
    assert not (whole / "calibration").exists()
    report = json.loads((whole / "attachments" / "report.json").read_text())["calibration"]
    assert list(report) == ["1", "2", "3"] and sum(report["2"]["tokens"]) == 8 * 64 * 4
    assert report["2"]["shrunk_experts"] == [e for e, n in enumerate(report["2"]["tokens"]) if n < 512]


@pytest.mark.parametrize("jobs", [2, 5])
def test_workers_change_no_byte(jobs: int, whole: Path, tmp_path: Path) -> None:
    run("tiny-glm", tmp_path / "out", jobs=jobs, **SMALL, **LAYERS)
    assert core_digests(tmp_path / "out") == core_digests(whole)


def test_mapped_arrays_change_no_byte(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit.calibration.memory.DEFAULT_ARRAY_BYTES", 100_000)
    run("tiny-glm", tmp_path / "out", **SMALL, **LAYERS)
    assert core_digests(tmp_path / "out") == core_digests(whole)


def test_too_little_memory_is_told_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match=r"not enough to calibrate: .* are needed"):
        run("tiny-glm", tmp_path / "out", jobs=1, max_memory=resident_bytes() + (38 << 20))
    assert not (tmp_path / "out.partial").exists()


def stop_in(layer: int, weights: int, stop: Callable[[], None]) -> Callable[[Any], None]:
    """A progress callback that stops after so many weights of a layer of tiny-glm."""
    seen = 0

    def callback(event: Any) -> None:
        nonlocal seen
        if event.stage == "calibration" and f"layer-{layer:05d}" in event.unit:
            seen += 1
            if seen == weights:
                stop()

    return callback


def crash() -> None:
    raise RuntimeError("crash")


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers that forward passes run through."""
    layers: list[int] = []
    real = Stream.forward

    def forward(self: Stream, work: Any) -> None:
        layers.append(self.position)
        real(self, work)

    monkeypatch.setattr(Stream, "forward", forward)
    return layers


@pytest.mark.parametrize(("layer", "weights", "from_layer"), [(1, 1, 1), (2, 48, 2), (3, 20, 3)])
def test_resumes_at_the_layer_it_was_at(
    layer: int, weights: int, from_layer: int, whole: Path, tmp_path: Path, passed: list[int]
) -> None:
    with pytest.raises(RuntimeError, match="crash"):
        run("tiny-glm", tmp_path / "out", on_progress=stop_in(layer, weights, crash), **SMALL, **LAYERS)
    passed.clear()
    run("tiny-glm", tmp_path / "out", **SMALL, **LAYERS)
    assert passed == list(range(from_layer, 4))
    assert core_digests(tmp_path / "out") == core_digests(whole)


@pytest.mark.parametrize("damage", ["state", "shard"])
def test_what_is_damaged_is_computed_again(damage: str, whole: Path, tmp_path: Path, passed: list[int]) -> None:
    with pytest.raises(RuntimeError, match="crash"):
        run("tiny-glm", tmp_path / "out", on_progress=stop_in(3, 5, crash), **SMALL, **LAYERS)
    work = tmp_path / "out.partial"
    if damage == "state":
        for state in (work / "calibration").glob("state-*"):
            state.write_bytes(bytes(state.stat().st_size))
    else:
        (work / "decode" / "model-layer-00001.safetensors").unlink()
    passed.clear()
    run("tiny-glm", tmp_path / "out", **SMALL, **LAYERS)
    assert passed == [0, 1, 2, 3]
    assert core_digests(tmp_path / "out") == core_digests(whole)


def test_killed_run_repeats_no_expert_that_was_done(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passed: list[int]
) -> None:
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from tests.quantkit.convert.test_calibrated import LAYERS, SMALL, run, stop_in\n"
        "die = lambda: os.kill(os.getpid(), signal.SIGKILL)\n"
        "run('tiny-glm', Path(sys.argv[1]), jobs=1, on_progress=stop_in(2, 30, die), **SMALL, **LAYERS)\n"
    )
    child = subprocess.run([sys.executable, "-c", code, tmp_path / "out"], cwd=ROOT, timeout=100)
    assert child.returncode == -signal.SIGKILL
    quantized = count_experts(monkeypatch)
    run("tiny-glm", tmp_path / "out", **SMALL, **LAYERS)
    assert passed == [2, 3]
    # It died at the last weight of its tenth expert, before that was journalled.
    assert len(quantized) == (16 - 9) + 16 and len(set(quantized)) == len(quantized)
    assert core_digests(tmp_path / "out") == core_digests(whole)


def count_experts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The experts that are quantized from now on."""
    names: list[str] = []

    def counted(weights: Any, chosen: Any, routed: Any, inputs: Any, gating: Any, where: str, *more: Any) -> Any:
        names.append(where)
        return calibrate_expert(weights, chosen, routed, inputs, gating, where, *more)

    monkeypatch.setattr("quantkit.convert.calibrated.calibrate_expert", counted)
    return names


@pytest.mark.parametrize("propagate", ["quantized", "original"])
def test_experts_that_are_done_compute_with_what_was_written(
    propagate: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pass is lost, all of its experts are there: nothing is quantized again, later layers are alike."""
    options = {**SMALL, "layers": "1-2", "propagate": propagate}
    run("tiny-glm", tmp_path / "whole", **options)
    with pytest.raises(RuntimeError, match="crash"):
        run("tiny-glm", tmp_path / "out", jobs=1, on_progress=stop_in(2, 3, crash), **options)
    for state in (tmp_path / "out.partial" / "calibration").glob("state-*"):
        state.unlink()
    quantized = count_experts(monkeypatch)
    run("tiny-glm", tmp_path / "out", **options)
    assert quantized and all(name.startswith("model.layers.2.") for name in quantized)
    assert core_digests(tmp_path / "out") == core_digests(tmp_path / "whole")


def test_another_calibration_set_is_another_conversion(whole: Path, tmp_path: Path) -> None:
    with open_checkpoint("tiny-glm") as checkpoint:
        plan = build_plan(checkpoint, default_recipe().with_options(method="gptq", **SMALL, **LAYERS))
        with pytest.raises(UsageError, match="other calibration data"):
            convert(plan, checkpoint, whole, calibration=samples_of(8, 64))
    with pytest.raises(RuntimeError, match="crash"):
        run("tiny-glm", tmp_path / "out", on_progress=stop_in(1, 5, crash), **SMALL, **LAYERS)
    with pytest.raises(ArtifactError, match="another calibration set"):
        run("tiny-glm", tmp_path / "out", given=samples_of(8, 64), **SMALL, **LAYERS)


def test_propagation_of_the_original_leaves_the_first_layer_as_it_is(whole: Path, tmp_path: Path) -> None:
    run("tiny-glm", tmp_path / "out", propagate="original", **SMALL, **LAYERS)
    ours = {r.name: (r.layer, r.decode.outputs) for r in calibrated(tmp_path / "out")}
    differ = {r.layer for r in calibrated(whole) if ours[r.name][1] != r.decode.outputs}
    assert differ == {2, 3}


def check_report_of_all_tokens(artifact: Path, routed: list[int]) -> None:
    """What experts learned from and what the router sent are told apart, in every form."""
    stored = json.loads((artifact / "attachments" / "report.json").read_text())
    (layer,) = stored["calibration"].values()
    assert stored["route_all"] is True and set(layer["tokens"]) == {8 * 64} and layer["shrunk_experts"] == []
    assert sorted(layer["routed_tokens"] * 3) == sorted(routed)
    page = (artifact / "attachments" / "report.html").read_text()
    assert "route-all: every expert learned from all tokens" in page and "Starved experts" not in page
    assert "Calibration tokens that the router sent" in page and "an expert is starved" not in page
    text = "\n".join(map(str, show_report.conversion("x", stored)))
    assert f"route-all: each learned from all tokens, none is starved; the router sent {min(routed):,} at" in text


def test_all_tokens_and_the_original_inputs_of_down_reach_the_experts(whole: Path, tmp_path: Path) -> None:
    before = {r.name: r.decode for r in calibrated(whole)}
    for option in ({"route_all": True}, {"down_inputs": "original"}):
        out = tmp_path / next(iter(option))
        run("tiny-glm", out, samples=8, length=64, layers="1", **option)
        ours = {r.name: r.decode for r in calibrated(out)}
        assert len(ours) == 48 and verify_artifact(out).ok
        facts = [d.calibration or {} for d in ours.values()]
        is_all = "route_all" in option
        assert sum(f["routed_tokens" if is_all else "tokens"] for f in facts) == 3 * 8 * 64 * 4
        if is_all:
            assert {(f["tokens"], f["shrunk"]) for f in facts} == {(8 * 64, False)}
            check_report_of_all_tokens(out, [f["routed_tokens"] for f in facts])
        else:
            assert not any("routed_tokens" in f for f in facts)
        differ = {name.split(".")[-2] for name, d in ours.items() if d.outputs != before[name].outputs}
        assert differ == ({"down_proj"} if "down_inputs" in option else {"gate_proj", "up_proj", "down_proj"})


def test_plain_source_with_starved_experts(tmp_path: Path) -> None:
    """A BF16 source whose FP8 view is derived; three tokens for four experts, so that some see none."""
    source = write_moe(tmp_path / "source", "qwen3_moe", storage="bf16")
    run(source, tmp_path / "out", given=samples_of(1, 3), make_fp8=True)
    assert verify_artifact(tmp_path / "out").ok
    facts = [r.decode.calibration for r in calibrated(tmp_path / "out")]
    assert len(facts) == 2 * 4 * 3 and all(f and f["shrunk"] for f in facts)
    assert {f["tokens"] for f in facts if f} <= {0, 1, 2, 3}


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v32", "minimax_m2", "kimi_k2"])
def test_families(family: str, tmp_path: Path) -> None:
    tensors, config = moe(family)
    config |= {"use_qk_norm": True, "attention_bias": True} if family == "glm4_moe" else {}
    source = write_checkpoint(tmp_path / "source", tensors, config)
    run(source, tmp_path / "out", given=samples_of(2, 40))
    assert verify_artifact(tmp_path / "out").ok
    assert calibrated(tmp_path / "out")


def test_overflow_names_layer_and_expert(tmp_path: Path) -> None:
    tensors, config = moe("qwen3_moe", storage="bf16")
    norm = "model.layers.1.post_attention_layernorm.weight"
    tensors[norm] = replace(tensors[norm], data=b"\x80\x7f" * 256)  # infinite
    source = write_checkpoint(tmp_path / "source", tensors, config)
    with pytest.raises(SourceError, match=r"model\.layers\.1\.mlp\.experts\.\d.*(nan|inf)"):
        run(source, tmp_path / "out", given=samples_of(2, 40), make_fp8=True)


def test_a_module_outside_of_the_layers_is_refused(tmp_path: Path) -> None:
    tensors, config = moe("qwen3_moe")
    tensors["model.adapter.weight"] = tensors["model.embed_tokens.weight"]
    source = write_checkpoint(tmp_path / "source", tensors, config)
    with pytest.raises(RecipeError, match=r"outside of the decoder layers: model\.adapter"):
        run(source, tmp_path / "out", quantize=(r"model\.adapter",))


def test_closer_to_the_model_than_mse(tmp_path: Path) -> None:
    """The purpose: on held-out text, with 4,096 calibration tokens."""
    from quantkit_evals.dequantized import write_bf16_copy
    from quantkit_evals.fidelity import fidelity
    from quantkit_evals.models import load_model, quiet
    from quantkit_evals.text import token_blocks

    options = {"gptq": {"samples": 32, "length": 128}, "mse": {}}
    models = {}
    with open_checkpoint("tiny-glm") as checkpoint:
        for method, more in options.items():
            recipe = default_recipe().with_options(method=method, group_size=128, **more)
            artifact = convert(build_plan(checkpoint, recipe), checkpoint, tmp_path / method)
            copy = write_bf16_copy(artifact.decode.path, tmp_path / f"{method}-bf16")
            models[method] = load_model(copy, dtype="float32")
        reference = write_bf16_copy(checkpoint, tmp_path / "reference")
    blocks = token_blocks(reference, num_blocks=24, block_tokens=128)
    with quiet():
        found = fidelity(load_model(reference, dtype="float32"), models, blocks)
    assert found["gptq"].kl.value < 0.85 * found["mse"].kl.value
