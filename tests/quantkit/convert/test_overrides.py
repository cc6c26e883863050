"""Conversions with overrides: what is written opens elsewhere, and calibration sees the model as it will be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import match_name

from quantkit.artifact import Artifact, verify_artifact
from quantkit.artifact.records import read_records
from quantkit.artifact.verify import VerifyReport
from quantkit.calibration.expert import calibrate_expert
from quantkit.checkpoint import open_checkpoint
from quantkit.cli.show_report import conversion
from quantkit.convert import convert
from quantkit.inspection.conversions import compare_conversions, report_conversion
from quantkit.plan import build_plan
from quantkit.recipe import default_recipe
from tests.builders import f32, moe, write_checkpoint, write_moe
from tests.quantkit.convert.cases import core_digests
from tests.quantkit.convert.test_calibrated import samples_of

EXPERTS = ("gate_proj", "up_proj", "down_proj")


def run(source: Path, out: Path, *overrides: dict[str, Any], jobs: int = 1, **options: Any) -> Artifact:
    recipe = default_recipe().with_options(overrides=overrides, **{"method": "mse", **options})
    with open_checkpoint(source) as checkpoint:
        plan = build_plan(checkpoint, recipe)
        calibrated = plan.recipe.calibration is not None
        return convert(plan, checkpoint, out, jobs=jobs, calibration=samples_of(4, 40) if calibrated else None)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe(tmp_path_factory.mktemp("source") / "m", "qwen3_moe", layers=3)


def engines(report: VerifyReport) -> str:
    return next(check.detail for check in report.checks if check.name == "engines of decode")


def ways(artifact: Artifact) -> dict[str, tuple[str | None, int | None]]:
    records = (r for r in read_records(artifact.path) if r.decode.action == "quantize" and r.decode.method)
    return {r.name.removesuffix(".weight"): (r.decode.method, r.decode.group_size) for r in records}


def test_two_group_sizes_by_layer_open_with_compressed_tensors(source: Path, tmp_path: Path) -> None:
    override = {"pattern": r"layers\.1\.", "group_size": 128, "method": "rtn"}
    artifact = run(source, tmp_path / "out", override, rest="bf16")
    report = verify_artifact(artifact.path)
    assert report.ok and engines(report) == "vllm: tp 1; sglang: tp 1; transformers: no"
    view = artifact.decode
    config = QuantizationConfig.model_validate(view.tensors.config["quantization_config"])
    opened = {32: 0, 128: 0}
    for module in ways(artifact):
        (scheme,) = (
            group for group in config.config_groups.values() if any(match_name(module, t) for t in group.targets)
        )
        assert scheme.weights is not None
        opened[scheme.weights.group_size] += 1
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        stored = {}
        for name in compressor.compression_param_names(scheme):
            array = view.tensors.array(f"{module}.{name}")
            stored[name] = torch.from_numpy(np.ascontiguousarray(array).view(np.int16) if array.dtype == np.uint16
                                            else np.ascontiguousarray(array))  # fmt: skip
        stored["weight_scale"] = stored["weight_scale"].view(torch.bfloat16)
        theirs = compressor.decompress(stored, scheme)["weight"]
        assert torch.equal(theirs, torch.from_numpy(view[module].dequantize()).bfloat16()), module
    assert opened == {32: 2 * 4 * 3, 128: 4 * 3}


def test_report_and_verify_tell_them(source: Path, tmp_path: Path) -> None:
    ours = run(source, tmp_path / "a", {"pattern": r"experts\.1\.", "keep": True})
    report = verify_artifact(ours.path)
    assert [check.name for check in report.problems] == ["engines of decode"]
    assert "experts of one layer differ" in engines(report)
    assert "override   experts\\.1\\.: kept" in list(conversion("a", report_conversion(ours)))
    found = compare_conversions(ours, run(source, tmp_path / "b"))
    assert (found.a.overrides, found.b.overrides) == (1, 0)
    assert found.total.only_b == 3 * 3 and found.total.weights == 3 * 9


def test_layers_of_other_methods_are_run_as_they_will_be(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer 2 is calibrated behind layers 0 and 1 in INT4: its inputs are those of a model that holds these."""
    seen: list[torch.Tensor] = []

    def watched(weights: Any, chosen: Any, routed: Any, inputs: Any, *more: Any) -> Any:
        seen.append(inputs.states.clone())
        return calibrate_expert(weights, chosen, routed, inputs, *more)

    monkeypatch.setattr("quantkit.convert.calibrated.calibrate_expert", watched)
    override = {"pattern": r"layers\.2\.", "method": "gptq"}
    options = {"min_tokens": 8}
    artifact = run(source, tmp_path / "out", override, **options)
    assert verify_artifact(artifact.path).ok
    assert {method for method, _ in ways(artifact).values()} == {"mse", "gptq"}
    quantized, seen[:] = seen[0], []
    # An oracle: a source that holds the INT4 numbers of layers 0 and 1 in float32, which are kept.
    tensors, config = moe("qwen3_moe", layers=3)
    for module in (m for m in ways(artifact) if "layers.2." not in m):
        del tensors[f"{module}.weight_scale_inv"]
        tensors[f"{module}.weight"] = f32(artifact.decode[module].dequantize())
    held = write_checkpoint(tmp_path / "held", tensors, config)
    run(held, tmp_path / "alike", method="gptq", layers="2", **options)
    assert torch.equal(quantized, seen[0])
    seen.clear()
    run(source, tmp_path / "original", override, propagate="original", **options)
    assert not torch.equal(quantized, seen[0])
    assert core_digests(artifact.path) == core_digests(
        run(source, tmp_path / "two", override, jobs=2, **options).path
    )


def test_calibrated_projections_of_one_expert_may_differ(source: Path, tmp_path: Path) -> None:
    overrides = (
        {"pattern": r"0\.mlp.*gate_proj", "group_size": 64}, {"pattern": r"1\.mlp.*up_proj", "method": "rtn"},
        {"pattern": r"experts\.2\.down", "keep": True}, {"pattern": r"down", "group_size": 128},
    )  # fmt: skip
    artifact = run(source, tmp_path / "out", *overrides, method="gptq", min_tokens=8)
    found = ways(artifact)
    at = "model.layers.{}.mlp.experts.{}.{}"
    assert found[at.format(0, 1, "gate_proj")] == ("gptq", 64)
    assert found[at.format(0, 1, "up_proj")] == ("gptq", 32)
    assert found[at.format(1, 0, "up_proj")] == ("rtn", 32)
    assert found[at.format(1, 0, "down_proj")] == ("gptq", 128)
    assert at.format(2, 2, "down_proj") not in found
    failed = [check.name for check in verify_artifact(artifact.path).checks if not check.ok]
    assert failed == ["engines of decode"]
