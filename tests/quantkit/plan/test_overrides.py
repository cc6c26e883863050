"""Overrides of a recipe in a plan: whom they reach, what the config says of it, and what engines make of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import match_name
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantkit.checkpoint import open_checkpoint
from quantkit.cli.show_plan import plan as show
from quantkit.errors import RecipeError
from quantkit.models.role import Role
from quantkit.plan import Plan, build_plan
from quantkit.plan.fate import Action, Op
from quantkit.plan.probe import Rates
from quantkit.plan.summary import summarise
from quantkit.recipe import default_recipe
from tests.builders import write_moe
from tests.quantkit.plan.test_families_plan import check_accounting

RATES = Rates(1e8, 1e9, 1e9, "cpu")
FAMILIES = ("glm_moe_dsa", "qwen3_moe", "minimax_m2")
PATTERNS = (
    r"layers\.1\.", r"experts\.2\.", r"(down_proj|w2)$", r"self_attn", r"experts\.[01]\.(up_proj|w3)", "experts",
    ".", r"layers\.0\..*proj$",
)  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("overrides")
    return {family: write_moe(folder / family, family, layers=3) for family in FAMILIES}


def plan_of(path: Path, *overrides: dict[str, Any], **options: Any) -> Plan:
    with open_checkpoint(path) as checkpoint:
        return build_plan(checkpoint, default_recipe().with_options(method="mse", overrides=overrides, **options))


def summary_of(path: Path, *overrides: dict[str, Any], **options: Any) -> dict[str, Any]:
    with open_checkpoint(path) as checkpoint:
        recipe = default_recipe().with_options(method="mse", overrides=overrides, **options)
        return summarise(build_plan(checkpoint, recipe), checkpoint, rates=RATES)


def ways(plan: Plan) -> dict[str, tuple[str | None, int | None]]:
    """Module -> method and group size, of the jobs that make INT4."""
    jobs = (job for job in plan.jobs("decode") if job.op is Op.TO_INT4)
    return {job.sources[0].removesuffix(".weight"): (job.method, job.group_size) for job in jobs}


ENTRIES = st.builds(
    lambda pattern, keep, method, group_size: {
        "pattern": pattern,
        **({"keep": True} if keep or not (method or group_size) else {"method": method, "group_size": group_size}),
    },
    st.sampled_from(PATTERNS), st.sampled_from([False, False, True]), st.sampled_from([None, "rtn", "mse"]),
    st.sampled_from([None, 32, 64, 128]),
)  # fmt: skip


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    family=st.sampled_from(FAMILIES), overrides=st.lists(ENTRIES, min_size=1, max_size=4),
    linears=st.sampled_from(["routed", "all"]), rest=st.sampled_from(["fp8", "bf16"]),
)  # fmt: skip
def test_any_overrides(
    sources: dict, family: str, overrides: list[dict[str, Any]], linears: str, rest: str
) -> None:
    """The first match decides, nothing further is quantized, and each module is in one config group exactly."""
    options = {"linears": linears, "rest": rest}
    usual = ways(plan_of(sources[family], **options))
    first = {m: next((i for i, o in enumerate(overrides) if re.search(o["pattern"], m)), None) for m in usual}
    expected = {}
    for module, number in first.items():
        entry = {} if number is None else overrides[number]
        if not entry.get("keep"):
            expected[module] = (entry.get("method") or "mse", entry.get("group_size") or 32)
    if not expected or set(range(len(overrides))) - set(first.values()):
        with pytest.raises(RecipeError, match=r"matches no module|earlier override|nothing is left"):
            plan_of(sources[family], *overrides, **options)
        return
    plan = plan_of(sources[family], *overrides, **options)
    assert ways(plan) == expected
    assert plan.caught == tuple(list(first.values()).count(i) for i in range(len(overrides)))
    with open_checkpoint(sources[family]) as checkpoint:
        check_accounting(plan, checkpoint)
        modules = {m: w.weight.dtype for m, w in checkpoint.weights().items()}
    raw = plan.decode_config["quantization_config"]
    config = QuantizationConfig.model_validate({k: v for k, v in raw.items() if k != "version"})
    entries = [(None, config.ignore), *((group, group.targets) for group in config.config_groups.values())]
    for module, dtype in modules.items():
        hit = [group for group, targets in entries if any(match_name(module, target) for target in targets)]
        assert len(hit) == 1, module
        weights = hit[0] and hit[0].weights
        if module in expected:
            assert (weights.num_bits, weights.group_size) == (4, expected[module][1])
        else:
            assert weights is None if rest == "bf16" or dtype != "F8_E4M3" else weights.num_bits == 8
    for _, targets in entries:
        assert all(any(match_name(module, target) for module in modules) for target in targets)


def test_the_group_of_most_routed_experts_stands_first(sources: dict) -> None:
    """transformers takes the first whose target mentions experts, shared ones included."""
    plan = plan_of(sources["glm_moe_dsa"], {"pattern": r"mlp\.experts", "group_size": 128}, linears="all")
    groups = plan.decode_config["quantization_config"]["config_groups"]
    assert [g["weights"].get("group_size") for g in groups.values()] == [128, 32, None]
    assert any("shared_experts" in target for target in groups["group_1"]["targets"])


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([{"pattern": "no_such", "keep": True}], r"overrides\.0.*'no_such' matches no module to be quantized"),
        ([{"pattern": r"mlp\.gate$", "method": "rtn"}], "matches no module to be quantized"),
        ([{"pattern": "self_attn", "method": "rtn"}], "matches no module to be quantized"),
        (
            [{"pattern": "experts", "method": "rtn"}, {"pattern": r"experts\.1\.", "keep": True}],
            r"overrides\.1.*caught by an earlier override.*narrower",
        ),
        ([{"pattern": "experts", "keep": True}], "nothing is left to quantize"),
    ],
)
def test_refusals(sources: dict, overrides: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        plan_of(sources["glm_moe_dsa"], *overrides)
    assert re.search(says, str(caught.value).replace("\n", " "))


def test_a_group_size_that_does_not_divide(tmp_path: Path) -> None:
    path = write_moe(tmp_path / "m", "qwen3_moe", intermediate=96)
    with pytest.raises(RecipeError, match=r"down_proj\.weight.*\n?.*96 input features|96 input features"):
        plan_of(path, {"pattern": "down_proj", "group_size": 64})
    assert plan_of(path, {"pattern": "(gate|up)_proj", "group_size": 64}).methods == {
        ("mse", 64): 16,
        ("mse", 32): 8,
    }


def test_native_int4_takes_no_overrides(tmp_path: Path) -> None:
    path = write_moe(tmp_path / "m", "kimi_k25")
    with pytest.raises(RecipeError, match="overrides does not apply"):
        plan_of(path, {"pattern": "experts", "keep": True}, make_fp8=True)


def test_kept_modules_are_as_without_quantization(sources: dict) -> None:
    plan = plan_of(sources["glm_moe_dsa"], {"pattern": r"layers\.2\.", "keep": True})
    assert plan.quantized_layers == (1,)
    fates = [f for f in plan.fates.values() if f.layer == 2 and f.role is Role.ROUTED_EXPERT]
    assert {f.decode for f in fates} == {Action.KEEP, Action.RENAME}


@pytest.mark.parametrize(
    ("override", "vllm", "transformers"),
    [
        ({"pattern": r"layers\.2\.", "group_size": 64}, None, "those of layer 2 are INT4 group 64"),
        ({"pattern": r"layers\.2\.", "method": "rtn"}, None, None),
        ({"pattern": r"layers\.2\.", "keep": True}, None, "layer 2 are FP8 block"),
        ({"pattern": r"experts\.3\.", "group_size": 64}, "experts of one layer differ", "group 64"),
        (
            {"pattern": r"2\.mlp\.experts\.3\.down", "group_size": 64},
            "projections of one expert differ .*1 of 3",
            "64",
        ),
        ({"pattern": r"experts\.3\.down", "keep": True}, "projections of one expert differ", "FP8"),
    ],
)
def test_engines_that_cannot_load_it_are_named(
    sources: dict, override: dict[str, Any], vllm: str | None, transformers: str | None
) -> None:
    found = summary_of(sources["glm_moe_dsa"], override)["engines"]["decode"]
    for engine, says in (("vllm", vllm), ("sglang", vllm), ("transformers", transformers)):
        reasons = [r["message"] for r in found[engine]["1"]["reasons"] if r["rule"].endswith("-one-format")]
        assert (len(reasons) == 1 and re.search(says, reasons[0])) if says else not reasons, (engine, reasons)


def test_projections_that_engines_merge_are_looked_at_in_every_layer(sources: dict) -> None:
    odd = {"pattern": r"layers\.2\.self_attn\.k_proj", "group_size": 64}
    found = summary_of(sources["qwen3_moe"], odd, linears="all")["engines"]["decode"]["vllm"]["1"]
    merged = [r["message"] for r in found["reasons"] if r["rule"] == "merged-one-format"]
    assert merged and "k_proj INT4 group 64" in merged[0] and "q_proj INT4 group 32" in merged[0]
    whole = {"pattern": r"layers\.2\.self_attn\.[qkv]_proj", "group_size": 64}
    found = summary_of(sources["qwen3_moe"], whole, linears="all")["engines"]["decode"]["vllm"]["1"]
    assert not [r for r in found["reasons"] if r["rule"] == "merged-one-format"]


def test_plan_says_whom_each_override_caught(sources: dict) -> None:
    overrides = (
        {"pattern": r"layers\.2\.", "group_size": 64, "method": "rtn"},
        {"pattern": r"\.3\.", "keep": True},
    )
    found = summary_of(sources["glm_moe_dsa"], *overrides)
    text = "\n".join(block for block in show(found) if isinstance(block, str))
    assert "modules    12 rtn in groups of 64, 9 mse in groups of 32\n" in text
    assert "override   layers\\.2\\.: rtn, group size 64, 12 modules\n" in text
    assert "override   \\.3\\.: kept, 3 modules\n" in text


@pytest.mark.parametrize(
    ("limit", "action", "says"),
    [
        (0.2, "fail", "at most 0.2; over it: fail"),
        ({"gate": 0.1, "down": 0.15}, "retry", "at most gate 0.1, down 0.15; over it: try again, then fail"),
        (0.2, ["retry", "keep-fp8"], "at most 0.2; over it: try again, then keep the layer"),
    ],
)
def test_plan_shows_budget_and_calibration(sources: dict, limit: Any, action: Any, says: str) -> None:
    options = {"budget": {"max_relative_error": limit, "action": action}, "method": "gptq", "min_tokens": 7}
    with open_checkpoint(sources["qwen3_moe"]) as checkpoint:
        recipe = default_recipe().with_options(**options)
        found = summarise(build_plan(checkpoint, recipe), checkpoint, rates=RATES)
    lines = [block for block in show(found) if isinstance(block, str)]
    assert "modules    36 gptq in groups of 32" in lines
    assert any(line.startswith("budget     relative error") and line.endswith(says) for line in lines)
    (learning,) = (line for line in lines if "dampening" in line)
    assert "fewer than 7 tokens" in learning and "layers behind quantized ones" in learning


def test_calibration_options_stay_when_only_an_override_is_calibrated() -> None:
    recipe = default_recipe().with_options(method="gptq", samples=3)
    changed = recipe.with_options(method="mse", overrides=({"pattern": "x", "method": "gptq"},))
    assert changed.calibration is not None and changed.calibration.samples == 3
