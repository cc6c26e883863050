"""The library's surface: lazy, typed, and robust against its two names that are subpackages as well."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import quantkit
from quantkit import api, errors
from tests.builders import write_moe
from tests.quantkit.convert.cases import samples_of

SURFACE = {
    "Artifact", "Checkpoint", "Plan", "Recipe", "convert", "diff", "errors", "inspect", "open", "plan", "verify",
}  # fmt: skip


def test_the_surface_is_frozen() -> None:
    assert set(quantkit.__all__) == SURFACE
    for name in SURFACE:
        assert getattr(quantkit, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'opne'"):
        quantkit.opne  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    "before",
    [
        "", "import quantkit.plan.fate", "from quantkit.plan.fate import Fate",
        "import quantkit.convert as c; assert callable(c)", "quantkit.plan",
        "from quantkit import plan, convert; assert callable(plan) and callable(convert)",
    ],
)  # fmt: skip
def test_functions_stay_callable_whatever_was_imported_first(before: str) -> None:
    code = f"import quantkit\n{before}\nassert quantkit.plan('tiny-glm').family == 'glm_moe_dsa'"
    code += "\nimport quantkit.plan.fate as f\nassert f.Fate and quantkit.plan.Plan is quantkit.Plan"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_documented_way(tmp_path: Path) -> None:
    with quantkit.open("tiny-glm") as source:
        plan = quantkit.plan(source, recipe="tiny-glm", method="rtn")
        events: list[int] = []
        artifact = quantkit.convert(plan, tmp_path / "w4", on_progress=lambda e: events.append(e.done_bytes))
    assert events and events == sorted(events)
    assert repr(plan) == "<Plan of tiny-glm by tiny-glm: 763 tensors>"
    assert str(tmp_path) in repr(artifact) and len(repr(artifact)) < len(str(tmp_path)) + 50
    assert quantkit.verify(tmp_path / "w4", quick=True).ok
    assert artifact.verify(quick=True).ok
    assert artifact.decode["model.layers.3.mlp.experts.0.up_proj"].dequantize().shape == (128, 256)
    assert quantkit.inspect(artifact).what == quantkit.inspect(tmp_path / "w4").what == "artifact"
    assert quantkit.diff("tiny-glm", tmp_path / "w4").count("changed") == 240
    assert quantkit.convert(plan, tmp_path / "w4").was_complete


def test_a_source_is_enough(tmp_path: Path) -> None:
    source = write_moe(tmp_path / "source", "qwen3_moe")  # has no tokenizer; the default method needs samples
    samples = samples_of(2, 20)
    with quantkit.convert(source, tmp_path / "w4", calibration=samples) as artifact:
        assert artifact.manifest.source.family == "qwen3_moe"
        assert artifact.manifest.calibration_sha256 == samples.digest
    plan = quantkit.plan(source, method="rtn")
    with quantkit.convert(plan, tmp_path / "rtn") as artifact:
        assert artifact.manifest.calibration_sha256 is None


def test_recipe_choice(tmp_path: Path) -> None:
    assert quantkit.plan("tiny-glm").recipe.name == "tiny-glm"
    with quantkit.open("tiny-glm") as source:
        assert quantkit.plan(source).recipe.name == "tiny-glm"
    assert quantkit.plan("tiny-qwen3", group_size=64).recipe.decode.group_size == 64
    assert quantkit.plan(write_moe(tmp_path / "x", "mixtral")).recipe.name == "default"
    file = tmp_path / "mine.yaml"
    file.write_text("schema_version: 1\nname: mine\ndecode: {method: rtn}\n")
    assert quantkit.plan("tiny-glm", recipe=file).recipe.decode.method == "rtn"
    with pytest.raises(errors.RecipeError, match=r"source\.repo"):
        api.resolve(file)
    with pytest.raises(errors.RecipeError, match="group_size"):
        quantkit.plan("tiny-glm", groupsize=64)


def test_default_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = quantkit.plan("tiny-glm", group_size=128)
    expected = {
        "tiny-glm": "tiny-glm-w4-g128", "zai-org/GLM-5.2-FP8": "GLM-5.2-FP8-w4-g128", "a/b.yaml": "b-w4-g128",
        "m/model.safetensors": "model-w4-g128", "/x/y/": "y-w4-g128",
    }  # fmt: skip
    assert {s: str(api.default_output(s, plan)) for s in expected} == expected
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert str(api.default_output(".", plan)) == "here-w4-g128"


def test_unknown_names_are_answered_without_the_network() -> None:
    with pytest.raises(errors.UsageError, match=r"Did you mean glm-5\.[12]"):
        quantkit.open("glm-5.3")
