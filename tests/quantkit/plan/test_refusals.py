"""What planning refuses, with the exit code and the name of the tensor or option."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.checkpoint import open_checkpoint
from quantkit.errors import QuantkitError, RecipeError, SourceError, UnsupportedError
from quantkit.plan import Plan, build_plan
from quantkit.recipe import load_recipe
from tests.builders import bf16, f32, moe, write_checkpoint, write_moe
from tests.recipes import data_free_recipe


def plan_of(path: Path, **options: Any) -> Plan:
    with open_checkpoint(path) as checkpoint:
        return build_plan(checkpoint, data_free_recipe(**options))


def refusal(kind: type[QuantkitError], path: Path, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        plan_of(path, **options)
    assert type(caught.value) is kind
    return str(caught.value)


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe(tmp_path_factory.mktemp("glm") / "model", "glm_moe_dsa")


@pytest.mark.parametrize(
    "pattern, tensor",
    [
        (r"mlp\.gate$", "model.layers.1.mlp.gate.weight"),
        ("e_score_correction_bias", "e_score_correction_bias"),
        ("norm", "layernorm.weight"),
        ("embed_tokens", "model.embed_tokens.weight"),
        ("lm_head", "lm_head.weight"),
        (r"indexer\.wk", "self_attn.indexer.wk.weight"),
        ("kv_b_proj", "kv_b_proj.weight"),
        ("eh_proj", "eh_proj.weight"),
        (".*", "never quantized"),
        (r"\.mlp\.", "mlp.gate.weight"),
        (r"bias$", "bias"),
    ],
)
def test_patterns_cannot_reach_what_is_never_quantized(glm: Path, pattern: str, tensor: str) -> None:
    message = refusal(RecipeError, glm, quantize=(pattern,))
    assert tensor in message and "no option to force" in message


@pytest.mark.parametrize("option", ["quantize", "keep"])
def test_a_pattern_that_matches_nothing(glm: Path, option: str) -> None:
    message = refusal(RecipeError, glm, **{option: ("no_such_module",)})
    assert f"decode.{option}" in message and "matches no module" in message


def test_a_pattern_adds_modules(glm: Path) -> None:
    plan = plan_of(glm, quantize=(r"layers\.0\.self_attn\.o_proj",))
    names = plan.fates["model.layers.0.self_attn.o_proj.weight"].decode_names
    assert names[0] == "model.layers.0.self_attn.o_proj.weight_packed"
    assert plan.fates["model.layers.1.self_attn.o_proj.weight"].decode_names == (
        "model.layers.1.self_attn.o_proj.weight",
    )


def test_a_bias_next_to_a_quantized_module_is_not_a_refusal(tmp_path: Path) -> None:
    path = write_moe(tmp_path / "m", "glm4_moe")
    plan = plan_of(path, quantize=(r"layers\.1\.self_attn\.q_proj",))
    assert plan.fates["model.layers.1.self_attn.q_proj.bias"].decode_names == (
        "model.layers.1.self_attn.q_proj.bias",
    )


def test_layers(glm: Path) -> None:
    assert "layer 9" in refusal(RecipeError, glm, layers="9")
    assert "multi-token-prediction" in refusal(RecipeError, glm, layers="2")
    assert plan_of(glm, layers="2", mtp="quantize").quantized_layers == (2,)
    assert "layer 0" in refusal(RecipeError, glm, layers="0-1")
    assert "nothing is left" in refusal(RecipeError, glm, keep=("experts",))


def test_group_size_that_does_not_divide(tmp_path: Path) -> None:
    path = write_moe(tmp_path / "m", "qwen3_moe", intermediate=96)
    message = refusal(RecipeError, path, group_size=64)
    assert "down_proj.weight" in message and "group sizes that fit: 32" in message
    path = write_moe(tmp_path / "n", "qwen3_moe", intermediate=72)
    assert "no supported group size fits" in refusal(UnsupportedError, path)


def test_expert_gap_names_layer_and_experts(tmp_path: Path) -> None:
    tensors, config = moe("qwen3_moe", experts=16)
    left = {n: t for n, t in tensors.items() if not any(f"layers.1.mlp.experts.{e}." in n for e in (3, 7, 12))}
    path = write_checkpoint(tmp_path / "m", left, config)
    message = refusal(SourceError, path)
    assert "layer 1 has 13 of 16 routed experts; missing: 3, 7, 12" in message


def test_more_experts_than_the_config_says(tmp_path: Path) -> None:
    tensors, config = moe("qwen3_moe", experts=4)
    message = refusal(SourceError, write_checkpoint(tmp_path / "m", tensors, config | {"num_experts": 3}))
    assert "experts.3." in message and "there are 3" in message


def test_missing_projection(tmp_path: Path) -> None:
    tensors, config = moe("qwen3_moe")
    left = {n: t for n, t in tensors.items() if "layers.1.mlp.experts.2.up_proj" not in n}
    message = refusal(SourceError, write_checkpoint(tmp_path / "m", left, config))
    assert "model.layers.1.mlp.experts.2" in message and "up projection" in message


def test_experts_of_different_shapes(tmp_path: Path) -> None:
    tensors, config = moe("qwen3_moe", storage="bf16")
    tensors["model.layers.1.mlp.experts.2.up_proj.weight"] = bf16(np.ones((64, 256), np.float32))
    message = refusal(SourceError, write_checkpoint(tmp_path / "m", tensors, config), make_fp8=True)
    assert "model.layers.1.mlp.experts.2.up_proj.weight" in message and "[64, 256]" in message


def test_one_expert_is_fine(tmp_path: Path) -> None:
    plan = plan_of(write_moe(tmp_path / "m", "qwen3_moe", experts=1))
    assert plan.quantized_layers == (0, 1)


@pytest.mark.parametrize(
    "family, storage, kind", [("qwen3_moe", "bf16", "BF16"), ("kimi_k25", None, "native INT4")]
)
def test_no_fp8_side(tmp_path: Path, family: str, storage: str | None, kind: str) -> None:
    message = refusal(UnsupportedError, write_moe(tmp_path / "m", family, storage=storage))
    assert kind in message and "--make-fp8" in message


def test_make_fp8_of_an_fp8_source(glm: Path) -> None:
    assert "FP8 already" in refusal(RecipeError, glm, make_fp8=True)


@pytest.mark.parametrize(
    "options",
    [
        {"group_size": 64},
        {"linears": "all"},
        {"layers": "1"},
        {"keep": ("x",)},
        {"calibration": "x.txt", "method": "gptq"},
    ],
    ids=str,
)
def test_options_that_native_int4_cannot_honour(tmp_path: Path, options: dict[str, Any]) -> None:
    path = write_moe(tmp_path / "m", "kimi_k25")
    assert next(iter(options)) in refusal(RecipeError, path, make_fp8=True, **options)


def test_recipe_of_another_family(glm: Path) -> None:
    with open_checkpoint(glm) as checkpoint, pytest.raises(RecipeError, match=r"qwen3_moe.*glm_moe_dsa"):
        build_plan(checkpoint, load_recipe("tiny-qwen3"))


def test_unknown_family_in_the_recipe(glm: Path, tmp_path: Path) -> None:
    tensors, config = moe("qwen3_moe")
    path = write_checkpoint(tmp_path / "m", tensors, config | {"model_type": "novel"})
    assert "no_such" in refusal(UnsupportedError, path, family="no_such")
    assert plan_of(path, family="qwen3_moe").family == "qwen3_moe"
    assert any("novel" in w for w in plan_of(path).warnings)


def test_static_activation_scales_are_not_dropped_silently(tmp_path: Path) -> None:
    tensors, config = moe("qwen3_moe")
    tensors["model.layers.1.mlp.experts.0.up_proj.input_scale"] = f32(np.ones(1, np.float32))
    message = refusal(UnsupportedError, write_checkpoint(tmp_path / "m", tensors, config))
    assert "input_scale" in message


def test_mtp_of_a_model_without_it_warns(tmp_path: Path) -> None:
    assert any(
        "multi-token" in w for w in plan_of(write_moe(tmp_path / "m", "qwen3_moe"), mtp="quantize").warnings
    )


def test_exponent_scales_pass_through_with_a_warning(tmp_path: Path) -> None:
    path = write_moe(tmp_path / "m", "deepseek_v32", scale="F8_E8M0")
    plan = plan_of(path)
    assert any("F8_E8M0" in w for w in plan.warnings)
    assert not any("F8_E8M0" in w for w in plan_of(path, rest="bf16").warnings)
    kept = next(t for job in plan.jobs("decode") for t in job.outputs if t.dtype == "F8_E8M0")
    assert kept.name.endswith(".weight_scale")
