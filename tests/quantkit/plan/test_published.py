"""Plans at full size against the published byte counts: exact, for every checkpoint in the tables.

The published INT4 sizes count packed weights and scales; ``weight_shape`` (16 bytes a module, int64) comes on top.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from quantkit.errors import UnsupportedError
from quantkit.models.role import Role
from quantkit.plan import Plan, build_plan
from quantkit.plan.fate import Action
from quantkit.recipe import load_recipe
from tests import facts
from tests.facts import FactsCheckpoint

RECIPES = {
    "glm-5.2-fp8": "glm-5.2", "glm-5.1-fp8": "glm-5.1", "glm-4.7-fp8": "glm-4.7", "deepseek-v3-r1": "deepseek-r1",
    "deepseek-v3.2": "deepseek-v3.2", "kimi-k2-instruct-fp8": "kimi-k2-instruct",
    "kimi-k2.5-k2.6-int4": "kimi-k2.6", "qwen3-30b-a3b-fp8": "qwen3-30b-a3b",
    "qwen3-235b-a22b-fp8": "qwen3-235b-a22b", "minimax-m2.7-fp8": "minimax-m2.7",
}  # fmt: skip
FP8_SOURCES = [n for n in facts.names() if "int4" not in n]


def plan_of(name: str, **options: object) -> Plan:
    return build_plan(FactsCheckpoint(name), load_recipe(RECIPES[name]).with_options(**options))  # type: ignore[arg-type]


def published(name: str, group_size: int, which: str) -> int:
    return int(facts.facts(name)["sizes"]["int4_sizes_bytes_scales_bf16"][f"g{group_size}"][which])


def without_shapes(plan: Plan) -> int:
    modules = sum(f.decode is Action.QUANTIZE for f in plan.fates.values()) // 2
    shapes = plan.sizes.decode.by_dtype["I64"]
    assert shapes == 16 * modules
    return plan.sizes.decode.tensor_bytes - shapes


def test_every_table_has_its_recipe() -> None:
    assert sorted(RECIPES) == facts.names()


@pytest.mark.parametrize("name", FP8_SOURCES)
def test_fp8_source(name: str) -> None:
    """One plan per table (they take seconds): sizes, time, and exactness of the targets."""
    checkpoint = FactsCheckpoint(name)
    start = time.process_time()
    plan = build_plan(checkpoint, load_recipe(RECIPES[name]))  # type: ignore[arg-type]
    assert time.process_time() - start < 15  # the biggest take about 3 on an idle core
    sizes = facts.facts(name)["sizes"]
    assert plan.sizes.source.tensor_bytes == sizes["total_tensor_bytes_computed"]
    assert plan.sizes.source.num_tensors == len(plan.fates) == sizes["tensor_count_computed"]
    assert plan.sizes.prefill == plan.sizes.source and plan.prefill_is_source
    assert without_shapes(plan) == published(name, 32, "main_layers_only_int4_mtp_as_stored")
    assert plan.warnings == ()
    check_targets(plan, checkpoint)
    if name == "minimax-m2.7-fp8":
        check_minimax_target(plan)
    if name == "glm-4.7-fp8":
        check_channel_group(plan)
    if name == "glm-5.2-fp8":
        recipe = load_recipe("glm-5.2").with_options(method="mse", group_size=128, mtp="quantize")
        with_mtp = build_plan(checkpoint, recipe)  # type: ignore[arg-type]
        assert without_shapes(with_mtp) == published(name, 128, "all_routed_experts_int4")


def check_targets(plan: Plan, checkpoint: FactsCheckpoint) -> None:
    """Independent of how the patterns were made: modules are put to them and compared with dtype and fate."""
    quantization = plan.decode_config["quantization_config"]
    groups = list(quantization["config_groups"].values())
    assert [g["format"] for g in groups] == ["pack-quantized", "float-quantized"]
    lists = [g["targets"] for g in groups] + [quantization["ignore"]]
    compiled = [[re.compile(t[3:] if t.startswith("re:") else re.escape(t) + "$") for t in one] for one in lists]
    seen: Counter[int] = Counter()
    for fate in plan.fates.values():
        info = checkpoint.tensors[fate.name]
        if not fate.name.endswith(".weight") or len(info.shape) != 2 or (fate.expert or 0) % 50:
            continue
        quantized = fate.decode is Action.QUANTIZE
        expected = 0 if quantized else 1 if info.dtype == "F8_E4M3" else 2
        module = fate.name.removesuffix(".weight")
        assert [k for k, one in enumerate(compiled) if any(r.match(module) for r in one)] == [expected], module
        assert quantized == (fate.role is Role.ROUTED_EXPERT and not fate.is_mtp)
        seen[expected] += 1
    assert set(seen) == {0, 1, 2}


@pytest.mark.parametrize("group_size", [64, 128])
def test_other_group_sizes(group_size: int) -> None:
    plan = plan_of("qwen3-30b-a3b-fp8", group_size=group_size)
    assert without_shapes(plan) == published("qwen3-30b-a3b-fp8", group_size, "all_routed_experts_int4")


def check_minimax_target(plan: Plan) -> None:
    """Engines rename w1, w2 and w3; the target finds both spellings, and nothing that looks alike."""
    (target,) = plan.decode_config["quantization_config"]["config_groups"]["group_0"]["targets"]
    for module in ("model.layers.0.mlp.experts.3.gate_proj", "model.layers.61.block_sparse_moe.experts.3.w2"):
        assert re.match(target.removeprefix("re:"), module)
    for module in ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.shared_experts.gate_proj"):
        assert not re.match(target.removeprefix("re:"), module)


def check_channel_group(plan: Plan) -> None:
    """A source with one scale per channel keeps its own group for the rest."""
    source = facts.facts("glm-4.7-fp8")["config"]["quantization_config"]["config_groups"]["group_0"]
    group = plan.decode_config["quantization_config"]["config_groups"]["group_1"]
    assert group["weights"] == source["weights"] and group["input_activations"] == source["input_activations"]
    scale = plan.fates["model.layers.0.self_attn.q_proj.weight_scale"]
    assert (scale.decode, scale.decode_names) == (Action.KEEP, (scale.name,))


def test_native_int4_needs_make_fp8_and_passes_through() -> None:
    name = "kimi-k2.5-k2.6-int4"
    with pytest.raises(UnsupportedError, match="--make-fp8") as caught:
        plan_of(name, make_fp8=False)
    assert caught.value.exit_code == 3
    plan = plan_of(name)
    assert (plan.decode_origin, plan.prefill_origin) == ("publisher", "derived")
    assert plan.decode_is_source and plan.decode == () and plan.sizes.decode == plan.sizes.source
    assert plan.decode_config == facts.facts(name)["config"]
    experts = plan.sizes.prefill.by_role[Role.ROUTED_EXPERT]
    parameters = facts.facts(name)["sizes"]["expert_params_incl_mtp"]
    assert experts == {"F8_E4M3": parameters, "F32": parameters // 128 // 128 * 4}
    prefill = plan.prefill_config
    assert prefill is not None
    for place in (prefill, prefill["text_config"]):
        config = place["quantization_config"]
        assert (config["quant_method"], config["weight_block_size"]) == ("fp8", [128, 128])
        kept = config["modules_to_not_convert"]
        assert "language_model.lm_head" in kept and "language_model.model.layers.1.mlp.gate" in kept
        assert "mm_projector.proj.0" in kept and not any(".experts." in m for m in kept)


def test_memory_of_a_big_plan() -> None:
    """The plan of 118,629 tensors adds less than 300 MiB to the process."""
    script = """
from tests.facts import FactsCheckpoint
from quantkit.plan import build_plan
from quantkit.recipe import default_recipe
def resident():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(MARK))
MARK = "VmRSS:"
checkpoint = FactsCheckpoint("glm-5.2-fp8")
before = resident()
plan = build_plan(checkpoint, default_recipe())
MARK = "VmHWM:"
print((resident() - before) / 1024)
"""
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=root)
    assert 10 < float(done.stdout) < 300
