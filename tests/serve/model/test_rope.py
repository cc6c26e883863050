"""Rotary embeddings against transformers' own modules and functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, Glm4MoeConfig, GlmMoeDsaConfig, MiniMaxM2Config, Qwen3MoeConfig
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3
from transformers.models.glm4_moe import modeling_glm4_moe as glm4
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm5
from transformers.models.minimax_m2 import modeling_minimax_m2 as minimax
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3

from quantkit.errors import SourceError, UnsupportedError
from quantkit_serve.model.rope import rope_of, rotate_halves, rotate_pairs, softmax_scale

POSITIONS = torch.tensor([0, 1, 2, 63, 64, 1000, 4095, 4096, 131071, 1000000])
DEEPSEEK = {
    "rope_theta": 10000, "max_position_embeddings": 163840, "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
}  # fmt: skip
KIMI = {
    "rope_theta": 50000.0, "max_position_embeddings": 131072,
    "rope_scaling": {**DEEPSEEK["rope_scaling"], "beta_fast": 1.0, "factor": 32.0},  # type: ignore[dict-item]
}  # fmt: skip


def yarn(**changes: Any) -> dict[str, Any]:
    return {**DEEPSEEK, "rope_scaling": {**DEEPSEEK["rope_scaling"], **changes}}  # type: ignore[dict-item]


CASES = {
    "glm-5.2": ({"rope_parameters": {"rope_theta": 8000000, "rope_type": "default"}}, GlmMoeDsaConfig, glm5),
    "deepseek-v3": (DEEPSEEK, DeepseekV3Config, v3),
    "kimi-k2": (KIMI, DeepseekV3Config, v3),
    "other mscale": (yarn(mscale=0.707, mscale_all_dim=0.5), DeepseekV3Config, v3),
    "no mscale": (yarn(mscale=None, mscale_all_dim=None), DeepseekV3Config, v3),
    "attention factor": (yarn(attention_factor=1.5), DeepseekV3Config, v3),
    "not truncated": (yarn(truncate=False), DeepseekV3Config, v3),
    "linear": ({"rope_theta": 10000, "rope_scaling": {"type": "linear", "factor": 4.0}}, DeepseekV3Config, v3),
    "glm-4.7": ({"rope_theta": 1000000, "partial_rotary_factor": 0.5, "head_dim": 128}, Glm4MoeConfig, glm4),
    "qwen3 yarn": (
        {
            "rope_theta": 1000000, "max_position_embeddings": 32768, "head_dim": 64,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        },
        Qwen3MoeConfig, qwen3,
    ),
}  # fmt: skip


def theirs(
    config: Any, module: Any, positions: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    found = next(getattr(module, name) for name in dir(module) if name.endswith("RotaryEmbedding"))
    cos, sin = found(config)(torch.empty(1, dtype=dtype), positions[None])
    return cos[0], sin[0]


def head_dim(config: Any) -> int:
    return int(getattr(config, "qk_rope_head_dim", None) or config.head_dim)


@pytest.mark.parametrize("case", CASES)
def test_angles_equal_transformers(case: str) -> None:
    text, config_class, module = CASES[case]
    config = config_class.from_dict(dict(text))
    cos, sin = theirs(config, module, POSITIONS, torch.float32)
    ours = rope_of(text, head_dim(config)).angles(POSITIONS)
    half = ours.cos.shape[1]
    assert torch.equal(ours.cos, cos[:, :half])
    assert torch.equal(ours.sin, sin[:, :half])
    assert cos.shape[1] == 2 * half


@pytest.mark.parametrize("case", [name for name, (_, c, _) in CASES.items() if c is DeepseekV3Config])
def test_scale_of_the_scores_equals_transformers(case: str) -> None:
    text = CASES[case][0]
    config = DeepseekV3Config.from_dict(dict(text))
    assert softmax_scale(text, 192) == v3.yarn_apply_mscale(config.rope_parameters, 192**-0.5)


def test_minimax_rotates_as_many_columns_as_its_config_says() -> None:
    """transformers 5.17 reads partial_rotary_factor only, which published configs don't have."""
    config = MiniMaxM2Config.from_dict({"rope_theta": 5e6, "head_dim": 128, "partial_rotary_factor": 0.5})
    cos, _ = theirs(config, minimax, POSITIONS, torch.float32)
    ours = rope_of({"rope_theta": 5e6, "rotary_dim": 64}, 128).angles(POSITIONS)
    assert torch.equal(ours.cos, cos[:, :32])


def test_share_of_rotary_columns_that_a_family_implies() -> None:
    assert rope_of({"rope_theta": 1e4}, 32, partial=0.5).dim == 16
    assert rope_of({"rope_theta": 1e4, "partial_rotary_factor": 0.25}, 32, partial=0.5).dim == 8


def test_rotations_equal_transformers() -> None:
    """Half-split, interleaved and partial; queries ``[T, H, d]`` and single keys ``[T, d]``."""
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(10, 3, 64, generator=generator), torch.randn(10, 64, generator=generator)
    rope = rope_of(DEEPSEEK, 64)
    ours = rope.angles(POSITIONS)
    cos, sin = torch.cat([ours.cos] * 2, -1)[None], torch.cat([ours.sin] * 2, -1)[None]
    for rotate, reference in (
        (rotate_pairs, v3.apply_rotary_pos_emb_interleave), (rotate_halves, v3.apply_rotary_pos_emb),
    ):  # fmt: skip
        q, k = reference(query.transpose(0, 1)[None], key[None, None], cos, sin)
        assert torch.equal(rotate(query, ours), q[0].transpose(0, 1))
        assert torch.equal(rotate(key, ours), k[0, 0])
    partial = rope_of(DEEPSEEK, 32).angles(POSITIONS)
    cos, sin = torch.cat([partial.cos] * 2, -1)[None], torch.cat([partial.sin] * 2, -1)[None]
    q, _ = glm4.apply_rotary_pos_emb(query.transpose(0, 1)[None], key[None, None], cos, sin)
    assert torch.equal(rotate_halves(query, partial), q[0].transpose(0, 1))


def test_bfloat16_is_rounded_once() -> None:
    x = torch.randn(10, 2, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    angles = rope_of(DEEPSEEK, 64).angles(POSITIONS)
    assert torch.equal(rotate_pairs(x, angles), rotate_pairs(x.float(), angles).bfloat16())
    assert torch.equal(rotate_halves(x, angles), rotate_halves(x.float(), angles).bfloat16())


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ({"rope_theta": 1e4, "rope_scaling": {"type": "longrope", "factor": 2}}, UnsupportedError, "longrope"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, UnsupportedError, "same in all layers"),
        ({}, SourceError, "rope_theta is None"),
        ({"rope_theta": -1}, SourceError, "rope_theta is -1"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "yarn"}}, SourceError, "factor is None"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.02}, SourceError, "1 of 64 columns"),
    ],
)
def test_refusals_name_the_number(text: dict[str, Any], kind: type[SourceError], words: str) -> None:
    with pytest.raises(kind, match=words):
        rope_of(text, 64)
