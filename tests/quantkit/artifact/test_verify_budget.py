"""Verification of the quality budget: what does not fit together is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.artifact import verify_artifact
from quantkit.artifact.layout import MANIFEST, TENSORS
from quantkit.artifact.records import read_records
from tests.builders import write_moe
from tests.quantkit.convert.cases import run

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A conversion of three layers with experts, of which one is over the limit."""
    folder = tmp_path_factory.mktemp("budget")
    source = write_moe(folder / "model", "glm_moe_dsa", layers=4)
    run(source, folder / "all")
    errors = [r.decode.relative_error or 0 for r in read_records(folder / "all")]
    budget = {"max_relative_error": max(errors) - 2e-6, "action": "keep-fp8"}
    return run(source, folder / "out", budget=budget).path


def problems(artifact: Path) -> str:
    """Of the section alone: the digests of edited files are wrong as well."""
    checks = verify_artifact(artifact, quick=True).checks
    assert any(check.name == "budget" for check in checks)
    return "; ".join(f"{c.where}: {c.detail}" for c in checks if c.name == "budget" and not c.ok)


def edit_manifest(artifact: Path, edit: Edit) -> None:
    content = json.loads((artifact / MANIFEST).read_text())
    edit(content)
    (artifact / MANIFEST).write_text(json.dumps(content))


def amendment(content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = content["plan_amendments"][0]
    return found


def another_layer(content: dict[str, Any]) -> None:
    other = next(n for n in (1, 2, 3) if n != amendment(content)["layer"])
    content["plan_amendments"].append(amendment(content) | {"layer": other})


def test_sound(made: Path) -> None:
    assert problems(made) == ""


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda m: m.update(plan_amendments=[]), "but its layer is not amended"),
        (another_layer, "is quantized, but its layer is amended"),
        (lambda m: m["plan_amendments"].append(amendment(m)), "amended twice"),
        (lambda m: amendment(m).update(over_limit=0), "counts 0 of"),
        (lambda m: amendment(m).update(weights=3), "the records"),
        (lambda m: amendment(m)["worst"].update(limit=0.01), "does not follow from the budget"),
        (lambda m: amendment(m)["worst"].update(relative_error=0.01), "does not follow from the budget"),
        (lambda m: amendment(m)["worst"].update(tensor="model.norm.weight"), "no kept weight of the layer"),
        (lambda m: m["recipe"]["budget"].update(action=["fail"]), "the recipe's budget keeps no layer"),
        (lambda m: m["recipe"].pop("budget"), "the recipe's budget keeps no layer"),
        (lambda m: m["recipe"]["budget"].update(max_relative_error="much"), "cannot be read"),
        (lambda m: m["recipe"]["budget"].update(max_relative_error=0.01), "is over its limit 0.01"),
    ],
)
def test_manifest_that_lies(made: Path, tmp_path: Path, edit: Edit, says: str) -> None:
    copy = Path(shutil.copytree(made, tmp_path / "copy"))
    edit_manifest(copy, edit)
    assert says in problems(copy)


def test_weight_over_its_limit(made: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(made, tmp_path / "copy"))
    lines = [json.loads(line) for line in (copy / TENSORS).read_text().splitlines()]
    one = next(
        line for line in lines if line["decode"]["action"] == "quantize" and "relative_error" in line["decode"]
    )
    one["decode"]["relative_error"] = 0.5
    (copy / TENSORS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert f"{one['name']}: relative error 0.5 is over its limit" in problems(copy)
