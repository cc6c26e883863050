"""A quality budget in a recipe, seen from the command line."""

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
