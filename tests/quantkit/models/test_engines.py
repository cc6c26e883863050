"""Engine rules: every rule fires where it must, agrees with failures reported upstream, and stays silent else."""

from __future__ import annotations

from typing import Any

import pytest

from quantkit.errors import SourceError, UsageError
from quantkit.models.config import quantization_of
from quantkit.models.engine_rules import ENGINES, RULES, Level
from quantkit.models.engines import TENSOR_PARALLEL, Finding, check, check_all, verdict
from quantkit.models.linears import Cut, linears
from quantkit.models.quantization import read_quantization
from tests.facts import facts

EXPERTS = r"re:.*\.(mlp|block_sparse_moe)\.experts\.\d+\.(gate_proj|up_proj|down_proj|w1|w2|w3)$"


def decode_config(
    group_size: int = 32,
    *,
    mtp_layer: int | None = None,
    rest: bool = True,
    targets: list[str] | None = None,
    **int4: Any,
) -> dict[str, Any]:
    """A decode view's quantization_config as docs/format.md section 3 describes it."""
    not_mtp = f"(?!.*\\.layers\\.{mtp_layer}\\.)" if mtp_layer is not None else ""
    weights = {
        "num_bits": 4, "type": "int", "strategy": "group", "group_size": group_size, "symmetric": True,
        "dynamic": False, "actorder": None,
    } | int4  # fmt: skip
    groups = {
        "int4": {
            "format": "pack-quantized",
            "targets": targets or ["re:" + not_mtp + EXPERTS[3:]],
            "weights": weights,
        }
    }
    if rest:
        fp8 = {
            "num_bits": 8,
            "type": "float",
            "strategy": "block",
            "block_structure": [128, 128],
            "symmetric": True,
        }
        groups["fp8"] = {"format": "float-quantized", "targets": ["Linear"], "weights": fp8}
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": groups,
        "ignore": ["lm_head", r"re:.*\.mlp\.gate$", r"re:.*weights_proj$"],
    }


def at(
    model: str, quantization: dict[str, Any] | None, engine: str, tp: int, **config: Any
) -> dict[str, list[Finding]]:
    """Findings by rule for a published config, some numbers of it changed."""
    found: dict[str, list[Finding]] = {}
    for finding in check(facts(model)["config"] | config, quantization, engine, tp):
        found.setdefault(finding.rule, []).append(finding)
    return found


def levels(model: str, quantization: dict[str, Any] | None, engine: str) -> list[str]:
    by_tp = check_all(facts(model)["config"], quantization)[engine]
    return [verdict(by_tp[tp]).value for tp in TENSOR_PARALLEL]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("glm-5.2-fp8", ["ok"] * 5),  # 2048 / 16 = 128
        ("deepseek-v3-r1", ["ok"] * 5),
        ("minimax-m2.7-fp8", ["ok", "ok", "ok", "no", "no"]),  # vLLM PR 48173: 1536 / 8 = 192
        ("qwen3-235b-a22b-fp8", ["ok", "ok", "ok", "no", "no"]),  # vLLM 17569: 1536 / 8 = 192
        ("qwen3-30b-a3b-fp8", ["ok", "ok", "no", "no", "no"]),  # vLLM 25292: 768 / 4 = 192
        ("glm-4.7-fp8", ["ok"] * 5),  # per channel: no blocks to cut
    ],
)
def test_published_fp8_checkpoints_load_where_users_report_it(
    engine: str, model: str, expected: list[str]
) -> None:
    assert levels(model, quantization_of(facts(model)["config"]), engine) == expected


def test_a_failing_fp8_split_says_which_numbers() -> None:
    config = facts("minimax-m2.7-fp8")["config"]
    found = at("minimax-m2.7-fp8", quantization_of(config), "vllm", 8)
    assert found["fp8-experts"][0].message == "expert width 1536 / TP 8 is not a multiple of the FP8 block 128"
    assert "#17569" in found["fp8-experts"][0].source


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_glm_52_decode_view_loads_up_to_tp_16(group_size: int) -> None:
    quantization = decode_config(group_size, mtp_layer=78)
    assert levels("glm-5.2-fp8", quantization, "vllm") == ["ok"] * 5
    # SGLang: loads, on conditions that are spelled out
    assert levels("glm-5.2-fp8", quantization, "sglang") == ["warn"] * 5
    messages = [f.message for f in at("glm-5.2-fp8", quantization, "sglang", 8)["mixed-precision"]]
    assert len(messages) == 3
    assert "#37207" in messages[0]
    assert "--disable-shared-experts-fusion" in messages[1]
    assert "weight_scale_inv" in messages[2]


@pytest.mark.parametrize(
    ("group_size", "tp", "vllm", "sglang"),
    [
        (32, 4, "ok", "ok"),  # 768 / 4 = 192 = 3 x 64
        (64, 4, "ok", "ok"),
        (128, 4, "no", "no"),  # 192 is not a multiple of 128
        (128, 2, "ok", "ok"),
        (32, 8, "warn", "no"),  # 96 is a multiple of 32 but not of 64: Marlin does not fit
        (64, 8, "no", "no"),
        (32, 16, "no", "no"),  # 48
    ],
)
def test_int4_experts_under_tensor_parallelism(group_size: int, tp: int, vllm: str, sglang: str) -> None:
    quantization = decode_config(group_size, rest=False)
    for engine, expected in (("vllm", vllm), ("sglang", sglang)):
        assert [f.level.value for f in at("qwen3-30b-a3b-fp8", quantization, engine, tp)["int4-experts"]] == [
            expected
        ]


def test_hidden_size_must_suit_marlin() -> None:
    found = at("qwen3-30b-a3b-fp8", decode_config(rest=False), "sglang", 1, hidden_size=2112)
    assert found["int4-experts"][0].level is Level.NO
    assert "hidden size 2112" in found["int4-experts"][0].message


@pytest.mark.parametrize(("group_size", "level"), [(16, "no"), (32, "ok"), (64, "ok"), (128, "ok"), (256, "no")])
def test_group_sizes(group_size: int, level: str) -> None:
    found = at("glm-5.2-fp8", decode_config(group_size), "vllm", 1)
    assert [f.level.value for f in found["int4-group-size"]] == [level]


def test_channel_strategy_is_group_minus_one() -> None:
    found = at("glm-5.2-fp8", decode_config(strategy="channel", group_size=None), "vllm", 8)
    assert "-1" in found["int4-group-size"][0].message
    assert found["int4-group-size"][0].level is found["int4-experts"][0].level is Level.OK


def test_heads_and_kv_heads() -> None:
    assert at("glm-4.7-fp8", None, "vllm", 16)["heads"][0].level is Level.OK
    assert at("glm-4.7-fp8", None, "vllm", 64)["heads"][0].level is Level.NO
    # 4 KV heads: divided up to 4, repeated at 8; 3 GPUs fit neither way
    assert [at("qwen3-30b-a3b-fp8", None, "vllm", tp)["kv-heads"][0].level.value for tp in (2, 4, 8, 3)] == [
        "ok", "ok", "ok", "no",
    ]  # fmt: skip
    assert "kv-heads" not in at("glm-5.2-fp8", None, "vllm", 8)


def test_sglang_refuses_asymmetric_and_activation_order() -> None:
    assert "int4-symmetric" not in at("glm-5.2-fp8", decode_config(), "sglang", 8)
    asymmetric = at("glm-5.2-fp8", decode_config(symmetric=False), "sglang", 8)["int4-symmetric"]
    ordered = at("glm-5.2-fp8", decode_config(actorder="group"), "sglang", 8)["int4-symmetric"]
    assert {f.level for f in asymmetric} == {f.level for f in ordered} == {Level.NO}
    assert "symmetric" in asymmetric[0].message
    assert "unsharded" in ordered[0].message


def test_three_projections_of_an_expert_share_a_format() -> None:
    lopsided = decode_config(targets=[r"re:.*experts\.\d+\.(gate_proj|up_proj)$"])
    found = at("glm-5.2-fp8", lopsided, "vllm", 8)["expert-one-format"][0]
    assert found.level is Level.NO
    assert "model.layers.3.mlp.experts.0" in found.message


def test_with_module_names_every_expert_is_checked() -> None:
    modules = [
        f"model.layers.{layer}.mlp.experts.{e}.{p}"
        for layer in range(3, 6)
        for e in range(4)
        for p in ("gate_proj", "up_proj", "down_proj")
    ]
    config, quantization = facts("glm-5.2-fp8")["config"], decode_config()
    assert verdict(check(config, quantization, "vllm", 8, modules=modules)) is Level.OK
    quantization["ignore"].append("model.layers.4.mlp.experts.2.up_proj")
    assert verdict(check(config, quantization, "vllm", 8)) is Level.OK  # the representative is another one
    bad = [f for f in check(config, quantization, "vllm", 8, modules=modules) if f.level is Level.NO]
    assert [f.rule for f in bad] == ["expert-one-format"]
    assert "in 1 of 3 layers: model.layers.4.mlp.experts.2" in bad[0].message


def test_experts_of_a_layer_share_a_format() -> None:
    """Whole layers may differ; within one, an engine fuses all experts and knows one scheme."""
    config = facts("glm-5.2-fp8")["config"]
    experts = [
        f"model.layers.{n}.mlp.experts.{e}.{p}_proj"
        for n in (3, 4)
        for e in (0, 1)
        for p in ("gate", "up", "down")
    ]
    one_expert = [r"re:.*layers\.(3\.mlp\.experts\.1|4\.mlp\.experts\.\d+)\.(gate_proj|up_proj|down_proj)$"]
    one_layer = [r"re:.*layers\.4\.mlp\.experts\.\d+\.(gate_proj|up_proj|down_proj)$"]
    for targets, level in ((one_expert, Level.NO), (one_layer, Level.OK)):
        found = check(config, decode_config(targets=targets), "vllm", 1, modules=experts)
        (judged,) = [f for f in found if f.rule == "expert-one-format"]
        assert judged.level is level, judged
    assert "model.layers.3.mlp" not in judged.message


def test_experts_of_layers_left_in_fp8_are_checked_too() -> None:
    # --layers 3: width 768 / TP 4 suits INT4 g32 and not FP8 blocks of 128
    quantization = decode_config(targets=[r"re:.*layers\.0\.mlp\.experts\.\d+\.\w+_proj$"])
    modules = [
        f"model.layers.{i}.mlp.experts.0.{p}" for i in (0, 1) for p in ("gate_proj", "up_proj", "down_proj")
    ]
    config = facts("qwen3-30b-a3b-fp8")["config"]
    found = {f.rule: f.level for f in check(config, quantization, "vllm", 4, modules=modules)}
    assert found["int4-experts"] is Level.OK
    assert found["fp8-experts"] is Level.NO
    assert found["expert-one-format"] is Level.OK


def test_merged_matrices_share_a_format() -> None:
    quantization = decode_config()
    quantization["ignore"].append(r"re:.*shared_experts\.up_proj$")
    found = at("glm-5.2-fp8", quantization, "sglang", 8)["merged-one-format"]
    assert [f.level for f in found] == [Level.NO]
    assert "gate_proj FP8 block 128x128, up_proj unquantized" in found[0].message


def test_mtp_layer_left_in_fp8_only_costs_speculation() -> None:
    # width 1536 at TP 8 is 192: INT4 g64 experts fit, FP8 blocks of the MTP layer do not
    quantization = decode_config(64, mtp_layer=78, rest=True)
    found = at("glm-5.2-fp8", quantization, "vllm", 8, moe_intermediate_size=1536, n_shared_experts=0)
    assert found["int4-experts"][0].level is Level.OK
    assert found["fp8-experts"][0].level is Level.WARN
    assert "speculative" in found["fp8-experts"][0].message


def test_fp8_shared_experts_are_cut_along_blocks() -> None:
    # vLLM: DeepSeek-V4-Pro, 3072 / 16 = 192, refused at shared_experts.down_proj
    found = at("deepseek-v3-r1", decode_config(32, mtp_layer=61), "vllm", 16, moe_intermediate_size=3072)
    assert found["fp8-linears"][0].level is Level.NO
    assert "mlp.shared_experts.down_proj has 192 columns per GPU" in found["fp8-linears"][0].message


def test_partial_block_at_the_end_of_a_merged_matrix_is_allowed() -> None:
    quantization = quantization_of(facts("glm-5.2-fp8")["config"])
    assert at("glm-5.2-fp8", quantization, "vllm", 1)["fp8-linears"][0].level is Level.OK  # kv_a: 576 rows


def test_int4_attention_is_checked_for_its_own_shape() -> None:
    quantization = decode_config(128, rest=False, targets=["Linear"])
    found = at("qwen3-30b-a3b-fp8", quantization, "vllm", 16)
    assert "int4-linears" not in found  # o_proj: 4096 / 16 = 256
    found = at("qwen3-30b-a3b-fp8", quantization, "vllm", 16, num_attention_heads=16)
    assert {f.level for f in found.get("int4-linears", [])} == set()  # 2048 / 16 = 128
    found = at("qwen3-30b-a3b-fp8", quantization, "vllm", 16, num_attention_heads=16, head_dim=64)
    assert found["int4-linears"][0].level is Level.NO  # 1024 / 16 = 64 columns, groups of 128
    assert "o_proj" in found["int4-linears"][0].message


def test_linear_target_is_a_matter_of_vllm() -> None:
    only_experts = decode_config(rest=False)
    assert at("glm-5.2-fp8", only_experts, "vllm", 1)["linear-target"][0].level is Level.WARN
    assert "linear-target" not in at("glm-5.2-fp8", decode_config(), "vllm", 1)
    assert "linear-target" not in at("glm-5.2-fp8", only_experts, "sglang", 1)


def test_sglang_without_mixture_has_nothing_to_warn_of() -> None:
    assert "mixed-precision" not in at("glm-5.2-fp8", decode_config(rest=False), "sglang", 8)
    assert (
        levels("kimi-k2.5-k2.6-int4", quantization_of(facts("kimi-k2.5-k2.6-int4")["config"]), "sglang")
        == ["ok"] * 5
    )


def test_sglang_may_fuse_shared_experts_of_the_same_format() -> None:
    quantization = decode_config(targets=[r"re:.*mlp\.(shared_)?experts\..*_proj$"], mtp_layer=None)
    messages = [f.message for f in at("glm-5.2-fp8", quantization, "sglang", 8)["mixed-precision"]]
    assert not any("fusion" in m for m in messages)
    assert len(messages) == 2


def test_transformers() -> None:
    decode = at("glm-5.2-fp8", decode_config(), "transformers", 1)
    assert {f.level for found in decode.values() for f in found} == {Level.OK}
    fp8 = at("glm-5.2-fp8", quantization_of(facts("glm-5.2-fp8")["config"]), "transformers", 1)
    assert fp8["partial-blocks"][0].level is Level.WARN
    assert "kv_a_proj_with_mqa" in fp8["partial-blocks"][0].message
    assert "model-type" in at("kimi-k2-instruct-fp8", None, "transformers", 1)
    assert at("glm-5.2-fp8", None, "transformers", 2)["tensor-parallel"][0].level is Level.WARN
    qwen = quantization_of(facts("qwen3-30b-a3b-fp8")["config"])
    assert "partial-blocks" not in at("qwen3-30b-a3b-fp8", qwen, "transformers", 1)  # whole blocks only


@pytest.mark.parametrize("rest", [True, False])
def test_transformers_reads_experts_in_one_format(rest: bool) -> None:
    """Seen with ``--layers 2-3``: it refuses, or loads with random experts in every other layer."""
    some = decode_config(targets=[r"re:.*layers\.(?:3|4)\.mlp\.experts\.\d+\.(gate|up|down)_proj$"], rest=rest)
    modules = [f"model.layers.{i}.mlp.experts.0.{p}_proj" for i in (3, 4, 5) for p in ("gate", "up", "down")]
    found = {
        engine: [
            f
            for f in check(facts("glm-5.2-fp8")["config"], some, engine, 1, modules=modules)
            if f.level is Level.NO
        ]
        for engine in ENGINES
    }
    assert [f.rule for f in found.pop("transformers")] == ["experts-one-format"]
    assert found == {"vllm": [], "sglang": []}
    # 1536 / 8 fits no FP8 block; only layer 5 is in FP8 here, and the shared experts, which hid it once.
    if rest:
        narrow = check(
            facts("glm-5.2-fp8")["config"] | {"moe_intermediate_size": 1536}, some, "vllm", 8, modules=modules
        )
        assert "fp8-experts" in {f.rule for f in narrow if f.level is Level.NO}
    for every in (decode_config(rest=rest), decode_config(rest=rest, mtp_layer=78)):
        assert verdict(check(facts("glm-5.2-fp8")["config"], every, "transformers", 1)) is Level.OK


def test_unknown_formats_are_refused_not_passed() -> None:
    found = at("glm-5.2-fp8", {"quant_method": "awq"}, "vllm", 1)
    assert found["known-format"][0].level is Level.NO
    assert found["known-format"][0].message.endswith(": awq")


def test_bad_calls() -> None:
    config = facts("glm-5.2-fp8")["config"]
    with pytest.raises(UsageError, match="tgi"):
        check(config, None, "tgi", 1)
    with pytest.raises(UsageError, match="0"):
        check(config, None, "vllm", 0)
    with pytest.raises(SourceError, match="hidden_size"):
        check({}, None, "vllm", 1)


def test_every_rule_has_a_source_and_known_engines() -> None:
    assert len({r.name for r in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.source
        assert set(rule.engines) <= set(ENGINES)


def test_check_all_agrees_with_check() -> None:
    config, quantization = facts("qwen3-30b-a3b-fp8")["config"], decode_config(64)
    everything = check_all(config, quantization)
    assert list(everything) == list(ENGINES)
    for engine, by_tp in everything.items():
        assert by_tp == {tp: check(config, quantization, engine, tp) for tp in TENSOR_PARALLEL}


@pytest.mark.parametrize(
    "model", ["glm-5.2-fp8", "deepseek-v3-r1", "qwen3-30b-a3b-fp8", "minimax-m2.7-fp8", "glm-4.7-fp8"]
)
def test_representative_linears_exist_in_the_checkpoint(model: str) -> None:
    """The shapes derived from the config are those of the published tensors."""
    from tests.facts import tensors

    published = tensors(model)
    for linear in linears(facts(model)["config"]):
        assert published[linear.module + ".weight"].shape == (linear.out_features, linear.in_features), (
            linear.module
        )


def test_per_gpu_shapes() -> None:
    by_name = {
        x.module.rpartition(".")[2]: x
        for x in linears(facts("qwen3-30b-a3b-fp8")["config"])
        if x.group == "attention"
    }
    assert by_name["q_proj"].per_gpu(8) == (512, 2048)
    assert by_name["k_proj"].per_gpu(8) == (128, 2048)  # 4 heads on 8 GPUs: one each, twice
    assert by_name["k_proj"].per_gpu(3) is None
    assert by_name["o_proj"].per_gpu(8) == (2048, 512)
    assert by_name["q_proj"].per_gpu(64) is None  # a head is never divided
    assert by_name["q_proj"].cut is Cut.OUT


def test_ignore_entries_match_names_parents_and_last_components() -> None:
    quantization = read_quantization({
        "quant_method": "fp8", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "model.layers.1.self_attn", "model.layers.0.mlp.up_proj"],
    })  # fmt: skip
    plain = [
        "model.layers.9.block_sparse_moe.gate",
        "model.layers.1.self_attn.q_proj",
        "model.layers.0.mlp.up_proj",
        "lm_head",
    ]
    stored = ["model.layers.9.mlp.gate_proj", "model.layers.11.self_attn.q_proj", "model.layers.0.mlp.up_proj_2"]
    assert [quantization.format_of(m).kind for m in plain] == ["plain"] * 4
    assert [quantization.format_of(m).kind for m in stored] == ["fp8-block"] * 3
