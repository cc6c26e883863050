"""KV bytes per token: our formats worked out by hand, and the figures that others publish."""

from __future__ import annotations

import pytest

from quantkit.errors import SourceError
from quantkit.models.config import text_shape
from quantkit.models.kv import kv_bytes_per_token
from tests.facts import facts


@pytest.mark.parametrize(
    ("model", "kind", "bf16", "fp8"),
    [
        # 78 latents, 21 of the layers run an indexer
        ("glm-5.2-fp8", "mla+dsa", 78 * 1152 + 21 * 256, 78 * 656 + 21 * 132),
        ("glm-5.1-fp8", "mla+dsa", 78 * (1152 + 256), 78 * (656 + 132)),
        ("deepseek-v3.2", "mla+dsa", 61 * (1152 + 256), 61 * (656 + 132)),
        ("deepseek-v3-r1", "mla", 61 * 1152, 61 * 656),
        ("kimi-k2-instruct-fp8", "mla", 61 * 1152, 61 * 656),
        ("kimi-k2.5-k2.6-int4", "mla", 61 * 1152, 61 * 656),
        # layers x KV heads x (K and V) x bytes
        ("qwen3-30b-a3b-fp8", "gqa", 98_304, 48 * 4 * 2 * (128 + 4)),
        ("qwen3-235b-a22b-fp8", "gqa", 192_512, 94 * 4 * 2 * (128 + 4)),
        ("minimax-m2.7-fp8", "gqa", 253_952, 62 * 8 * 2 * (128 + 4)),
        ("glm-4.7-fp8", "gqa", 376_832, 92 * 8 * 2 * (128 + 4)),
    ],
)
def test_ours(model: str, kind: str, bf16: int, fp8: int) -> None:
    kv = kv_bytes_per_token(facts(model)["config"])
    assert (kv.kind, kv.bf16, kv.fp8) == (kind, bf16, fp8)


def test_figures_quoted_for_kimi_k26() -> None:
    kv = kv_bytes_per_token(facts("kimi-k2.5-k2.6-int4")["config"])
    assert (kv.plain_bf16, kv.plain_fp8) == (70_272, 35_136)


def test_figures_quoted_for_glm_52() -> None:
    kv = kv_bytes_per_token(facts("glm-5.2-fp8")["config"])
    assert (kv.engine_fp8, kv.engine_bf16) == (61_464, 100_152)
    assert (kv.plain_bf16, kv.plain_fp8) == (89_856, 44_928)
    assert (kv.fp8, kv.bf16) == (53_940, 95_232)


def test_figure_quoted_for_deepseek_v32() -> None:
    assert kv_bytes_per_token(facts("deepseek-v3.2")["config"]).engine_fp8 == 48_068


def test_engine_figures_only_where_engines_have_that_layout() -> None:
    for model in ("deepseek-v3-r1", "qwen3-30b-a3b-fp8"):
        kv = kv_bytes_per_token(facts(model)["config"])
        assert kv.engine_fp8 is None
        assert kv.engine_bf16 is None


def test_mla_is_replicated_on_every_gpu() -> None:
    kv = kv_bytes_per_token(facts("glm-5.2-fp8")["config"])
    assert [kv.on_one_gpu(kv.fp8, tp) for tp in (1, 2, 8, 16)] == [53_940] * 4


def test_gqa_heads_are_divided_then_replicated() -> None:
    kv = kv_bytes_per_token(facts("qwen3-235b-a22b-fp8")["config"])
    assert [kv.on_one_gpu(kv.fp8, tp) for tp in (1, 2, 4, 8, 16)] == [99_264, 49_632, 24_816, 24_816, 24_816]


def test_the_misleading_head_dim_of_glm_52_is_not_used() -> None:
    config = facts("glm-5.2-fp8")["config"]
    before = kv_bytes_per_token(config)
    config["head_dim"] = 1
    assert kv_bytes_per_token(config) == before
    assert text_shape(config).head_dim is None


def test_head_dim_falls_back_to_hidden_over_heads() -> None:
    config = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 3}
    kv = kv_bytes_per_token(config)
    assert kv.bf16 == 3 * 8 * 64 * 2 * 2
    assert kv.fp8 == 3 * 8 * (64 + 4) * 2


def test_latent_that_is_no_multiple_of_the_scale_block_gets_a_scale_more() -> None:
    config = facts("deepseek-v3-r1")["config"] | {"kv_lora_rank": 130, "num_hidden_layers": 1}
    assert kv_bytes_per_token(config).fp8 == 130 + 2 * 4 + 2 * 64


@pytest.mark.parametrize("key", ["num_hidden_layers", "qk_rope_head_dim", "hidden_size"])
@pytest.mark.parametrize("value", [None, 0, -3, "61", True])
def test_missing_numbers_are_named(key: str, value: object) -> None:
    config = facts("deepseek-v3-r1")["config"] | {key: value}
    with pytest.raises(SourceError, match=key) as caught:
        kv_bytes_per_token(config)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("model", "experts", "top_k", "shared", "width", "dense_layers"),
    [
        ("glm-5.2-fp8", 256, 8, 1, 2048, 3),
        ("kimi-k2.5-k2.6-int4", 384, 8, 1, 2048, 1),
        ("qwen3-30b-a3b-fp8", 128, 8, 0, 768, 0),
        ("minimax-m2.7-fp8", 256, 8, 0, 1536, 0),
        ("glm-4.7-fp8", 160, 8, 1, 1536, 3),
    ],
)
def test_expert_numbers(model: str, experts: int, top_k: int, shared: int, width: int, dense_layers: int) -> None:
    shape = text_shape(facts(model)["config"])
    assert (shape.experts, shape.top_k, shape.shared_experts) == (experts, top_k, shared)
    assert (shape.moe_intermediate, shape.dense_layers) == (width, dense_layers)
