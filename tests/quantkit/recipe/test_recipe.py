"""The recipe schema: options, the content that affects bytes, the bundled files and the published JSON Schema."""

from __future__ import annotations

import hashlib
import json
from importlib import resources
from pathlib import Path

import pytest

from quantkit.errors import RecipeError
from quantkit.recipe import Recipe, default_recipe, find_recipe, load_recipe, recipe_names
from quantkit.recipe.load import parse_recipe, render_json_schema
from quantkit.recipe.recipe import OPTIONS
from quantkit.recipe.sections import CalibrationSection, parse_layers
from quantkit.recipe.validate import validate
from tests.recipes import data_free_recipe

PUBLISHED = {
    "glm-5.2": "zai-org/GLM-5.2-FP8", "glm-5.1": "zai-org/GLM-5.1-FP8", "glm-4.7": "zai-org/GLM-4.7-FP8",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3", "deepseek-r1": "deepseek-ai/DeepSeek-R1",
    "deepseek-v3.2": "deepseek-ai/DeepSeek-V3.2", "kimi-k2-instruct": "moonshotai/Kimi-K2-Instruct",
    "kimi-k2.6": "moonshotai/Kimi-K2.6", "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B-FP8",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B-FP8", "minimax-m2.7": "MiniMaxAI/MiniMax-M2.7",
    "tiny-glm": "tiny-glm", "tiny-qwen3": "tiny-qwen3",
}  # fmt: skip


def test_bundled_recipes_are_the_published_checkpoints() -> None:
    assert {name: load_recipe(name).source.repo for name in recipe_names()} == PUBLISHED
    for name in recipe_names():
        recipe = load_recipe(name)
        assert recipe.name == name and recipe.description
        is_native_int4 = name == "kimi-k2.6"  # with nothing to quantize, and so nothing to calibrate
        assert recipe.prefill.make_fp8 == is_native_int4
        assert recipe.decode.method == ("mse" if is_native_int4 else "gptq")
        assert recipe.calibration == (None if is_native_int4 else CalibrationSection())


@pytest.mark.parametrize("label", ["zai-org/GLM-5.2-FP8", "ZAI-ORG/glm-5.2-fp8", "glm-5.2"])
def test_recipe_is_found_by_repository_or_name(label: str) -> None:
    found = find_recipe(label)
    assert found is not None and found.name == "glm-5.2"
    assert find_recipe("someone/else") is None


def test_published_schema_is_fresh() -> None:
    stored = (resources.files("quantkit_recipes") / "recipe.schema.json").read_text()
    assert stored == render_json_schema(), (
        "run: python -m quantkit.recipe.schema recipes/quantkit_recipes/recipe.schema.json"
    )


def test_schema_is_closed_everywhere() -> None:
    schema = json.loads(render_json_schema())
    for part in (schema, *schema["$defs"].values()):
        assert part["additionalProperties"] is False
    for field in [
        *schema["properties"].values(),
        *(f for d in schema["$defs"].values() for f in d["properties"].values()),
    ]:
        assert "description" in field or "$ref" in field


def test_defaults() -> None:
    decode = default_recipe().decode
    assert (decode.scheme, decode.group_size, decode.method, decode.linears) == ("int4", 32, "gptq", "routed")
    assert (decode.rest, decode.mtp, decode.layers, decode.quantize, decode.keep) == ("fp8", "keep", None, (), ())
    assert default_recipe().calibration == CalibrationSection()


def test_recipes_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        default_recipe().decode.group_size = 64  # type: ignore[misc]


def test_with_options_makes_a_new_recipe_and_none_changes_nothing() -> None:
    base = default_recipe()
    new = base.with_options(
        group_size=128, layers="3-5,9", place="copy", make_fp8=True, max_shard_size="1GiB", method=None
    )
    assert (new.decode.group_size, new.decode.layers, new.decode.method) == (128, (3, 4, 5, 9), "gptq")
    assert (new.prefill.place, new.prefill.make_fp8, new.output.max_shard_bytes) == ("copy", True, 1 << 30)
    assert base == default_recipe()
    assert new.with_options() == new


def test_every_field_is_an_option() -> None:
    fields = {
        k for k in Recipe.model_fields if k not in ("schema_version", "source", "decode", "prefill", "output")
    }
    for section in ("source", "decode", "calibration", "prefill", "output"):
        fields |= set(type(getattr(calibrated(), section)).model_fields)
    assert set(OPTIONS) == fields - {"data"}  # which goes by the section's own name, calibration


def test_unknown_option_names_the_nearest() -> None:
    with pytest.raises(RecipeError, match="'group_size'"):
        default_recipe().with_options(groupsize=32)


@pytest.mark.parametrize(
    "options",
    [
        {"group_size": 64},
        {"method": "rtn"},
        {"rest": "bf16"},
        {"layers": "1"},
        {"keep": ("x",)},
        {"max_shard_size": "1GB"},
    ],
)
def test_content_changes_with_what_affects_bytes(options: dict) -> None:
    assert default_recipe().with_options(**options).content() != default_recipe().content()


def test_content_ignores_what_affects_no_byte() -> None:
    base = default_recipe()
    same = base.with_options(
        name="x", description="y", place="copy", repo="a/b", revision="main", max_shard_size="10000MB"
    )
    assert same.content() == base.content()
    assert base.with_options(keep=("b", "a")).content() == base.with_options(keep=("a", "b", "a")).content()
    json.dumps(base.content())


@pytest.mark.parametrize(
    "text, layers",
    [
        ("3", (3,)),
        ("3-5,4,1", (1, 3, 4, 5)),
        ([1, "3-4"], (1, 3, 4)),
        (7, (7,)),
        (None, None),
        (" 2 - 3 ", (2, 3)),
    ],
)
def test_layers(text: object, layers: tuple[int, ...] | None) -> None:
    assert parse_layers(text) == layers


@pytest.mark.parametrize("text", ["", "a", "5-3", "1--2", "-1", [True], [1.5], [], "1,,2", "٣", "999999"])
def test_layers_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"layer|range"):
        parse_layers(text)


def test_file_by_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("schema_version: 1\nname: mine\ndecode:\n  layers: 3-10,12\n  group_size: 64\n")
    recipe = load_recipe(path)
    assert recipe.decode.layers == (*range(3, 11), 12)
    assert load_recipe(str(path)) == recipe
    path.write_text(json.dumps(recipe.model_dump(mode="json")))
    assert load_recipe(path) == recipe


def calibrated(**options: object) -> Recipe:
    return default_recipe().with_options(method="gptq", **options)


def test_a_calibrated_method_has_a_calibration_section() -> None:
    assert calibrated().calibration == CalibrationSection()
    recipe = calibrated(calibration="my.jsonl", samples=7, min_tokens=0, propagate="original", percdamp=0.1)
    assert recipe.calibration == CalibrationSection(
        data="my.jsonl", samples=7, min_tokens=0, propagate="original", percdamp=0.1
    )
    assert recipe.with_options() == recipe == Recipe.model_validate(recipe.model_dump(mode="json"))
    assert recipe.with_options(length=32).calibration == recipe.calibration.model_copy(update={"length": 32})  # type: ignore[union-attr]
    parsed = parse_recipe(
        b"{schema_version: 1, name: x, decode: {method: gptq}, calibration: {seed: 3}}", where="x"
    )
    assert parsed.calibration == CalibrationSection(seed=3)


def test_data_free_recipes_know_nothing_of_calibration() -> None:
    base = data_free_recipe()
    assert base.calibration is None
    assert "calibration" not in base.content() and "calibration" not in base.model_dump(mode="json")
    # The digests of data-free recipes are those from before there was calibration.
    digest = hashlib.sha256(json.dumps(base.content(), sort_keys=True).encode()).hexdigest()
    assert digest == "2ef684ea54cde73a2b057b0cec8afdf76fe325692db4124abbe4b405fe422372"


def test_a_data_free_method_replaces_a_calibrated_one_with_its_section() -> None:
    assert calibrated(samples=7).with_options(method="mse") == data_free_recipe()


@pytest.mark.parametrize("options", [{"samples": 7}, {"calibration": "bundled"}, {"method": "rtn", "seed": 0}])
def test_calibration_with_a_data_free_method_is_refused(options: dict) -> None:
    with pytest.raises(RecipeError, match=r"calibration: the method (mse|rtn) uses no calibration data.*gptq"):
        data_free_recipe(**options)
    with pytest.raises(RecipeError, match="uses no calibration data"):
        calibrated().with_options(**{"method": "mse", **options})


def test_calibration_in_a_file_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("schema_version: 1\nname: mine\ndecode: {method: mse}\ncalibration:\n  samples: 3\n")
    with pytest.raises(RecipeError, match=r"line 4: calibration: the method mse uses no calibration data"):
        load_recipe(path)
    path.write_text(
        "schema_version: 1\nname: mine\ndecode: {method: gptq}\ncalibration:\n  sample: 3\n  percdamp: 0\n"
        "  length: 1\n  propagate: both\n  data: ''\n"
    )
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert "5 problems" in str(caught.value) and "Did you mean 'samples'?" in str(caught.value)


def test_content_of_a_calibrated_recipe() -> None:
    base = calibrated().content()
    assert calibrated(calibration="elsewhere.txt").content() == base  # its digest stands for it
    for option in ({"samples": 7}, {"length": 32}, {"seed": 1}, {"min_tokens": 1}, {"percdamp": 0.1}):
        assert calibrated(**option).content() != base
    assert calibrated(propagate="original").content() != base


def test_unknown_name_lists_and_suggests() -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("glm-52")
    assert "'glm-5.2'" in str(caught.value) and caught.value.exit_code == 2


def test_an_override_alone_may_ask_for_calibration() -> None:
    data = {"schema_version": 1, "name": "x", "decode": {"method": "mse"}}
    data |= {"overrides": [{"pattern": r"layers\.3\.", "method": "gptq"}]}
    assert validate(data, where="x").calibration == CalibrationSection()
    with pytest.raises(RecipeError, match="uses no calibration data"):
        validate({**data, "overrides": [], "calibration": {"samples": 3}}, where="x")


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"pattern": "x"}, "either keep: true"),
        ({"pattern": "x", "keep": True, "group_size": 64}, "either keep: true"),
        ({"pattern": "(", "keep": True}, "not a regular expression"),
        ({"pattern": "x", "group_size": 48}, "32"),
        ({"pattern": "x", "methods": "rtn"}, "methods"),
    ],
)
def test_overrides_say_something_that_is_known(entry: dict[str, object], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        validate({"schema_version": 1, "name": "x", "overrides": [entry]}, where="x")


@pytest.mark.parametrize(
    ("given", "action"),
    [
        ("fail", ("fail",)), ("keep-fp8", ("keep-fp8",)), (["retry", "fail"], ("retry",)),
        (["retry", "keep-fp8"], ("retry", "keep-fp8")), (["keep-fp8", "retry"], None), ([], None), ("drop", None),
    ],
)  # fmt: skip
def test_actions_of_a_budget(given: object, action: tuple[str, ...] | None) -> None:
    budget_of_down = {"max_relative_error": {"down": 0.1}, "action": given}
    data = {"schema_version": 1, "name": "x", "budget": budget_of_down}
    if action is None:
        with pytest.raises(RecipeError, match="retry"):
            validate(data, where="x")
        return
    budget = validate(data, where="x").budget
    assert budget is not None and budget.action == action


def test_sections_that_say_nothing_are_in_no_digest() -> None:
    content = default_recipe().with_options(method="mse").content()
    assert not {"overrides", "budget", "calibration"} & content.keys()
