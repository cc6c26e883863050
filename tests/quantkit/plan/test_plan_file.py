"""Plan files: what is loaded is what was written, or an error that says why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quantkit.checkpoint import open_checkpoint
from quantkit.errors import RecipeError
from quantkit.plan import Plan, build_plan, load_plan, write_plan
from quantkit.recipe import load_recipe
from tests.builders import write_moe


@pytest.fixture
def plan_path(tmp_path: Path) -> Path:
    with open_checkpoint("tiny-glm") as checkpoint:
        write_plan(
            build_plan(checkpoint, load_recipe("tiny-glm").with_options(layers="2-3", rest="bf16")),
            tmp_path / "plan.json",
        )
    return tmp_path / "plan.json"


def edited(path: Path, **changes: Any) -> Path:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


def test_round_trip(plan_path: Path) -> None:
    plan, checkpoint = load_plan(plan_path)
    with checkpoint:
        again = build_plan(checkpoint, load_recipe("tiny-glm").with_options(layers="2-3", rest="bf16"))
    assert plan == again and plan.plan_id == again.plan_id
    assert Plan.from_json(plan_path.read_text()).plan_id == plan.plan_id
    data = json.loads(plan_path.read_text())
    assert data["plan_id"] == plan.plan_id and len(data["fate_rows"]) == len(plan.fates)
    assert data["sizes"]["decode"]["tensor_bytes"] == plan.sizes.decode.tensor_bytes
    assert dict(zip(data["fate_columns"], data["fate_rows"][0], strict=True))["name"] == next(iter(plan.fates))


def test_edited_recipe(plan_path: Path) -> None:
    recipe = json.loads(plan_path.read_text())["recipe"]
    recipe["decode"]["group_size"] = 64
    with pytest.raises(RecipeError, match="another plan"):
        load_plan(edited(plan_path, recipe=recipe))


def test_edited_fate(plan_path: Path) -> None:
    rows = json.loads(plan_path.read_text())["fate_rows"]
    rows[5][5] = "exclude"
    with pytest.raises(RecipeError, match="fates in the file"):
        load_plan(edited(plan_path, fate_rows=rows))


def test_changed_source(tmp_path: Path) -> None:
    source = write_moe(tmp_path / "m", "qwen3_moe")
    with open_checkpoint(source) as checkpoint:
        write_plan(build_plan(checkpoint, load_recipe("tiny-qwen3")), tmp_path / "plan.json")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"rope_theta": 5}))
    with pytest.raises(RecipeError, match="has changed since the plan was made"):
        load_plan(tmp_path / "plan.json")


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b'{"plan_format": 1}', b'{"plan_format": "1"}'])
def test_not_a_plan(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(RecipeError, match="not a plan file") as caught:
        load_plan(path)
    assert caught.value.exit_code == 2 and str(path) in str(caught.value)


def test_missing_and_foreign_format(tmp_path: Path, plan_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be read"):
        load_plan(tmp_path / "none.json")
    with pytest.raises(RecipeError, match="plan format 99"):
        load_plan(edited(plan_path, plan_format=99))


def test_plan_id_ignores_what_changes_no_byte() -> None:
    with open_checkpoint("tiny-glm") as checkpoint:
        base = load_recipe("tiny-glm")
        plan = build_plan(checkpoint, base)
        assert build_plan(checkpoint, base.with_options(place="copy", name="x")).plan_id == plan.plan_id
        assert build_plan(checkpoint, base.with_options(method="rtn")).plan_id != plan.plan_id
        assert build_plan(checkpoint, base.with_options(max_shard_size="1MB")).plan_id != plan.plan_id
