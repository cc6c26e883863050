"""Tiny checkpoints of every family with settings that published models have: the cases of the oracle tests."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.builders import Raw, bf16, fp8_block, moe, write_checkpoint

_YARN = {
    "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 0.5, "rope_theta": 1e4,
}  # fmt: skip
_INDEX_HEADS = 16
_GROUPS = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}


@dataclass(frozen=True)
class Case:
    """A checkpoint.

    Attributes:
        family: of ``tests.builders``.
        settings: further ones in config.json.
        options: of the builder.
        without: pattern of tensors that the settings leave without a place.
        dense: a layer that has a dense MLP instead of experts.
    """

    family: str
    settings: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    without: str = "$^"
    dense: int | None = None


CASES = {
    "qwen3_moe": Case("qwen3_moe"),
    "qwen3_moe, a dense layer": Case(
        "qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": [1]}, {"layers": 3},
        r"model\.layers\.1\.mlp\.", 1,
    ),
    "qwen3_moe in BF16, tied": Case(
        "qwen3_moe", {"tie_word_embeddings": True}, {"storage": "bf16"}, r"lm_head\."
    ),
    "glm4_moe": Case("glm4_moe", {"use_qk_norm": True, "attention_bias": True}),
    "glm4_moe, groups, no norms": Case(
        "glm4_moe", {"attention_bias": True, "partial_rotary_factor": 1.0, **_GROUPS}, {"experts": 8}, r".*_norm\."
    ),
    "mixtral": Case("mixtral"),
    "minimax_m2": Case(
        "minimax_m2",
        {"rope_parameters": {"rope_theta": 5e6, "rope_type": "default", "partial_rotary_factor": 0.5}},
    ),
    "deepseek_v3": Case("deepseek_v3", _GROUPS, {"experts": 8}),
    "deepseek_v32": Case("deepseek_v32", {"index_topk": 12}),
    "kimi_k2": Case("kimi_k2", {"rope_scaling": _YARN}),
    "glm_moe_dsa": Case(
        "glm_moe_dsa", {"index_topk": 12, "indexer_types": ["full", "shared", "full"]}, {"layers": 3},
        r".*layers\.1\.self_attn\.indexer\.",
    ),
}  # fmt: skip


def tensors(case: Case) -> tuple[dict[str, Raw], dict[str, Any]]:
    found, config = moe(case.family, **{"seed": 3, **case.options})
    found = {name: raw for name, raw in found.items() if not re.match(case.without, name)}
    if case.dense is not None:
        rng, wide = np.random.default_rng(9), config["intermediate_size"]
        for name, shape in (("gate", (wide, 256)), ("up", (wide, 256)), ("down", (256, wide))):
            values = (rng.standard_normal(shape) * 0.05).astype(np.float32)
            found |= fp8_block(f"model.layers.{case.dense}.mlp.{name}_proj", values)
    if "index_topk" in config:
        found |= _more_index_heads(found)
        config["index_n_heads"] = _INDEX_HEADS
    return found, config | case.settings


def _more_index_heads(found: dict[str, Raw]) -> dict[str, Raw]:
    """With the builder's four, a score is often exactly 0, and which of equals are chosen is nobody's promise."""
    rng, more = np.random.default_rng(11), dict[str, Raw]()
    for name in [name for name in found if name.endswith("indexer.wq_b.weight")]:
        at = name.removesuffix(".wq_b.weight")
        query = (rng.standard_normal((_INDEX_HEADS * 32, 128)) * 0.05).astype(np.float32)
        weights = (rng.standard_normal((_INDEX_HEADS, 256)) * 0.05).astype(np.float32)
        more |= {**fp8_block(f"{at}.wq_b", query), f"{at}.weights_proj.weight": bf16(weights)}
    return more


def checkpoint(folder: Path, case: Case) -> Path:
    return write_checkpoint(
        folder, *tensors(case), shards=2, side_files={"generation_config.json": b'{"eos_token_id": [0, 7]}'}
    )
