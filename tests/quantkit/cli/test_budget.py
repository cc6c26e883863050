"""A quality budget and overrides in a recipe, seen from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import Run

RECIPE = """\
schema_version: 1
name: careful
source: {{repo: tiny-glm}}
decode: {{method: mse}}
budget:
  max_relative_error: 0.089
  action: {action}
"""


@pytest.mark.parametrize("action", ["keep-fp8", "[retry, keep-fp8]"])
def test_layers_that_are_kept_are_named(run: Run, tmp_path: Path, action: str) -> None:
    recipe, out = tmp_path / "careful.yaml", tmp_path / "out"
    recipe.write_text(RECIPE.format(action=action))
    done = run("convert", recipe, "-o", out, "--json")
    assert done.code == 0
    (warning,) = [line for line in done.err.splitlines() if line.startswith("warning: ")]
    assert "layer 1 is not quantized: 5 of its 48 weights" in warning and "experts.5.down_proj" in warning
    (amendment,) = json.loads(done.out)["plan_amendments"]
    assert (amendment["layer"], amendment["action"], amendment["over_limit"]) == (1, "keep-fp8", 5)
    again = run("convert", recipe, "-o", out)
    assert "complete already" in again.err and "layer 1 is not quantized" in again.err
    assert run("verify", out).code == 0
    shown = run("report", out).out
    assert "kept       layer 1 by the quality budget: 5 of 48 weights over the limit" in shown
    assert json.loads(run("report", out, "--json").out)["amendments"] == [amendment]


def test_failure_has_exit_code_1(run: Run, tmp_path: Path) -> None:
    recipe = tmp_path / "strict.yaml"
    recipe.write_text(RECIPE.format(action="fail"))
    failed = run("convert", recipe, "-o", tmp_path / "out", "--json")
    found = json.loads(failed.out)
    assert failed.code == found["exit_code"] == 1 and found["error"]["type"] == "GateFailed"
    assert found["error"]["where"] == "model.layers.1.mlp.experts.5.down_proj.weight"
    assert "0.0903028 is over its limit 0.089" in found["error"]["message"] and failed.err.count("error: ") == 1
    assert "keep-fp8" in found["error"]["hint"] and not (tmp_path / "out").exists()


def test_a_limit_that_cannot_be_is_one_problem_in_the_words_of_the_recipe(run: Run, tmp_path: Path) -> None:
    recipe = tmp_path / "wrong.yaml"
    for given, says in (
        ("1.5", "budget.max_relative_error: Input should be less than 1 (seen: 1.5)"),
        ("{gate: 5}", "budget.max_relative_error.gate: Input should be less than 1 (seen: 5)"),
        ("{gat: 0.1}", "budget.max_relative_error.gat: unknown key. Did you mean 'gate'?"),
        ("{}", "budget.max_relative_error: no limit is given; accepted: one number"),
        ("[0.1]", "budget.max_relative_error: Input should be a valid number (seen: [0.1])"),
    ):
        recipe.write_text(RECIPE.format(action="fail").replace("0.089", given))
        failed = run("plan", recipe)
        assert failed.code == 2 and says in failed.err, failed.err
        assert "problems" not in failed.err and "[" not in failed.err.replace(f"(seen: {given})", "")


@pytest.mark.parametrize("pattern", ["experts\\.3\\.", "layers\\.2\\."])
def test_a_view_that_no_engine_can_load_is_no_surprise_of_verify(run: Run, tmp_path: Path, pattern: str) -> None:
    recipe, out = tmp_path / "mixed.yaml", tmp_path / "out"
    kept = f"overrides: [{{pattern: '{pattern}', keep: true}}]"
    recipe.write_text(RECIPE.format(action="fail").partition("budget:")[0] + kept)
    warnings = [line for line in run("convert", recipe, "-o", out).err.splitlines() if "no engine" in line]
    checked = run("verify", out, "--quick")
    if pattern.startswith("layers"):  # vLLM and SGLang take whole layers of another format
        assert not warnings and checked.code == 0
        return
    (warning,) = warnings
    assert warning.startswith("warning: no engine will load the decode view: experts of one layer differ")
    assert checked.code == 1 and "no engine can load it: experts of one layer differ" in checked.out
