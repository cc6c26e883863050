"""What the engine of a recipe can't do is refused when planning, with the reason; the rest is planned as ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quantkit.checkpoint import open_checkpoint
from quantkit.errors import RecipeError
from quantkit.plan import Plan, build_plan
from quantkit.recipe import default_recipe
from quantkit.recipe.recipe import Recipe
from tests.builders import write_moe


def planned(**options: Any) -> Plan:
    with open_checkpoint("tiny-glm") as checkpoint:
        return build_plan(checkpoint, default_recipe().with_options(**options))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"method": "rtn"}, r"decode\.method: the engine llmcompressor is not for rtn: without calibration data"),
        ({"method": "mse"}, r"not for mse: .* holds no model in memory; accepted: gptq, autoround"),
        ({"method": "awq"}, r"not for awq: llm-compressor folds its AWQ scales"),
        ({"method": "gptq+awq"}, r"not for gptq\+awq: llm-compressor folds"),
        ({"linears": "all-mlp"}, "given routed experts only, not the role"),
        ({"mtp": "quantize"}, "given routed experts only, not a multi-token"),
        ({"overrides": [{"pattern": "down", "group_size": 64}]}, "overrides: has no counterpart"),
        ({"budget": {"max_relative_error": 0.1}}, "budget: has no counterpart"),
        ({"min_tokens": 5}, r"calibration\.min_tokens: has no counterpart"),
        ({"route_all": False}, r"calibration\.route_all: false: has no counterpart"),
        ({"down_inputs": "original"}, r"calibration\.down_inputs: has no counterpart"),
        ({"method": "autoround", "percdamp": 0.1}, r"calibration\.percdamp: has no counterpart .* autoround"),
        ({"method": "autoround", "propagate": "original"}, r"calibration\.propagate: has no counterpart"),
    ],
)
def test_refused_with_llmcompressor(options: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        planned(**{"engine": "llmcompressor", "method": "gptq", **options})


def test_nothing_to_do_for_it_in_a_native_int4_source(tmp_path: Path) -> None:
    source = write_moe(tmp_path / "source", "kimi_k25")
    with (
        open_checkpoint(source) as checkpoint,
        pytest.raises(RecipeError, match=r"engine does not apply: .* INT4"),
    ):
        build_plan(checkpoint, default_recipe().with_options(engine="llmcompressor", make_fp8=True))


def test_autoround_needs_the_engine() -> None:
    with pytest.raises(RecipeError, match=r"autoround is run by llm-compressor.*--engine llmcompressor"):
        planned(method="autoround")
    with pytest.raises(RecipeError, match="autoround is run by llm-compressor"):
        planned(method="gptq", overrides=[{"pattern": "down", "method": "autoround"}])


def test_the_same_plan_but_for_who_quantizes() -> None:
    ours, theirs = planned(method="gptq"), planned(method="gptq", engine="llmcompressor")
    assert theirs.fates == ours.fates and theirs.decode == ours.decode and theirs.prefill == ours.prefill
    assert theirs.decode_config == ours.decode_config
    assert theirs.recipe.content() == ours.recipe.content()
    assert theirs.plan_id != ours.plan_id
    assert any("holds the whole model in memory" in warning for warning in theirs.warnings)
    assert not any("whole model" in warning for warning in ours.warnings)


def test_the_engine_is_in_a_recipe_only_where_it_is_another() -> None:
    assert "engine" not in default_recipe().model_dump(mode="json")
    recipe = default_recipe().with_options(engine="llmcompressor", method="autoround")
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe
    assert recipe.with_options(engine="quantkit", method="gptq") == default_recipe()
