"""GPTQ without being asked for; and where it cannot be, one error that says so before anything is written."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.artifact import Artifact, verify_artifact
from quantkit.artifact.records import read_records
from quantkit.checkpoint import open_checkpoint
from quantkit.cli.main import main
from quantkit.plan import build_plan
from quantkit.recipe import default_recipe, load_recipe, recipe_names
from tests.builders import FAMILIES, moe, write_checkpoint, write_moe

SMALL = ("--samples", "8", "--length", "64")
Command = Callable[..., tuple[int, Any, str]]


@pytest.fixture
def quantkit(capsys: pytest.CaptureFixture[str]) -> Command:
    """One command line in this process -> exit code, its JSON document, what it said."""

    def call(*arguments: str | Path) -> tuple[int, Any, str]:
        code = main([*map(str, arguments), "--json"])
        out, err = capsys.readouterr()
        return code, json.loads(out), err

    return call


def with_tokenizer(folder: Path, **config: Any) -> Path:
    """A model of two layers with the tokenizer of tiny-glm."""
    tensors, made = moe("glm_moe_dsa", vocab=8192)
    with open_checkpoint("tiny-glm") as tiny:
        side = {name: tiny.side_bytes(name) for name in ("tokenizer.json", "tokenizer_config.json")}
    return write_checkpoint(folder, tensors, made | config, side_files=side)


def test_the_main_job_calibrates(quantkit: Command, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, planned, _ = quantkit("plan", "tiny-glm", "--w4", *SMALL)
    assert code == 0 and planned["recipe"]["decode"]["method"] == "gptq"
    assert planned["calibration"]["tokens"] == 8 * 64
    code, made, said = quantkit("convert", "tiny-glm", "--w4", *SMALL, "-o", out)
    assert code == 0, said
    manifest = Artifact.open(out).manifest
    assert manifest.pair_id == made["pair_id"]
    assert manifest.recipe["decode"]["method"] == "gptq" and manifest.recipe["calibration"]["samples"] == 8
    assert manifest.calibration_sha256 is not None
    quantized = [record.decode for record in read_records(out) if record.decode.action == "quantize"]
    weights = [outcome for outcome in quantized if outcome.method]
    assert len(weights) == 5 * 16 * 3  # MoE layers, experts, projections
    assert {(outcome.method, outcome.calibration is not None) for outcome in weights} == {("gptq", True)}
    assert verify_artifact(out).ok


def test_every_recipe_of_a_source_with_something_to_quantize_says_gptq() -> None:
    methods = {name: load_recipe(name).decode.method for name in recipe_names()}
    assert {name for name, method in methods.items() if method != "gptq"} == {"kimi-k2.6"}
    assert default_recipe().decode.method == "gptq"


@pytest.mark.parametrize("family", FAMILIES)
def test_families_plan_with_it(family: str, tmp_path: Path) -> None:
    is_native_int4 = family == "kimi_k25"
    with open_checkpoint(write_moe(tmp_path / "model", family)) as checkpoint:
        plan = build_plan(checkpoint, default_recipe().with_options(make_fp8=is_native_int4))
    assert {job.method for job in plan.jobs("decode")} - {None} == (set() if is_native_int4 else {"gptq"})
    # Nothing is quantized in a native INT4 source, so the plan records no calibration that nothing uses.
    assert plan.recipe.decode.method == ("mse" if is_native_int4 else "gptq")
    assert (plan.recipe.calibration is None) == is_native_int4


def refused(quantkit: Command, source: Path, code: int, *says: str) -> None:
    out = source.parent / "out"
    got, document, _ = quantkit("convert", source, "--w4", *SMALL, "-o", out)
    error = document["error"]
    said = " ".join(str(error[key]) for key in ("message", "where", "accepted", "hint"))
    assert got == code and "--method mse" in error["hint"], said
    assert all(part in said for part in says), said
    assert not out.exists() and not out.with_name("out.partial").exists()


def test_source_without_tokenizer(quantkit: Command, tmp_path: Path) -> None:
    refused(quantkit, write_moe(tmp_path / "model", "glm_moe_dsa"), 3, "no tokenizer.json", "decode.method: mse")


def test_model_that_transformers_does_not_know(quantkit: Command, tmp_path: Path) -> None:
    source = with_tokenizer(tmp_path / "model", model_type="novel", architectures=["NovelForCausalLM"])
    refused(quantkit, source, 3, "no model of type 'novel'", "config.json")


def test_model_that_transformers_cannot_build(quantkit: Command, tmp_path: Path) -> None:
    source = with_tokenizer(tmp_path / "model", mlp_layer_types=["dense"])  # of two layers
    refused(quantkit, source, 3, "cannot build this model", "mlp_layer_types", "config.json")


def test_experts_that_cannot_be_streamed(
    quantkit: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaExperts

    built = GlmMoeDsaExperts.__init__

    def with_bias(self: Any, *arguments: Any) -> None:
        built(self, *arguments)
        self.has_bias = True

    monkeypatch.setattr(GlmMoeDsaExperts, "__init__", with_bias)
    refused(quantkit, with_tokenizer(tmp_path / "model"), 3, "experts of a kind", "layer 1")


@pytest.mark.parametrize("library", ["transformers", "torch"])
def test_library_that_is_not_installed(
    library: str, quantkit: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = with_tokenizer(tmp_path / "model")
    monkeypatch.setitem(sys.modules, library, None)
    refused(quantkit, source, 4, f"needs {library}", "pip install 'quantkit[calibrate]'")


def test_data_free_conversion_needs_none_of_it(
    quantkit: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_moe(tmp_path / "model", "mixtral")
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, _, said = quantkit("convert", source, "--method", "mse", "-o", tmp_path / "out")
    assert code == 0, said
