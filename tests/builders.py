"""Tiny synthetic Mixture-of-Experts checkpoints under every family's published names.

    write_moe(tmp_path, "glm_moe_dsa")                       # FP8 block 128, MTP layer, indexer, partial blocks
    write_moe(tmp_path, "qwen3_moe", storage="bf16")         # any family, any storage
    tensors, config = moe("kimi_k25", experts=3)             # native INT4

Sizes: hidden 256, intermediate 128, 2 layers (+ MTP), 4 experts. Same seed, same bytes. What ``tests.rawfiles``
offers for single files and broken ones is re-exported here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.rawfiles import (
    Array,
    Raw,
    bf16,
    e4m3_table,
    expand,
    f32,
    file_bytes,
    fp8,
    fp8_block,
    fp8_channel,
    from_bf16,
    header_of,
    int4_group,
    raw_bytes,
    to_bf16,
    to_e4m3,
    write_checkpoint,
    write_file,
    write_index,
    write_raw,
    zeros,
)

__all__ = [
    "FAMILIES",
    "Array",
    "Raw",
    "bf16",
    "e4m3_table",
    "expand",
    "f32",
    "file_bytes",
    "fp8",
    "fp8_block",
    "fp8_channel",
    "from_bf16",
    "header_of",
    "int4_group",
    "moe",
    "raw_bytes",
    "to_bf16",
    "to_e4m3",
    "write_checkpoint",
    "write_file",
    "write_index",
    "write_moe",
    "write_raw",
    "zeros",
]

FAMILIES = (
    "glm_moe_dsa", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "qwen3_moe", "glm4_moe", "minimax_m2",
    "mixtral",
)  # fmt: skip


@dataclass
class _Model:
    """Collects the tensors of one synthetic model."""

    storage: str
    seed: int
    scale: str = "F32"
    block: int = 128
    tensors: dict[str, Raw] = field(default_factory=dict)
    plain_modules: list[str] = field(default_factory=list)

    def values(self, *shape: int, std: float = 0.05) -> Array:
        rng = np.random.default_rng([self.seed, len(self.tensors)])
        return (rng.standard_normal(shape) * std).astype(np.float32)

    def linear(self, module: str, o: int, i: int, *, expert: bool = False) -> None:
        """A linear layer that the publisher quantizes (native INT4: only the experts)."""
        w = self.values(o, i)
        if self.storage == "int4" and expert:
            self.tensors |= int4_group(module, w)
        elif self.storage == "fp8-block":
            self.tensors |= fp8_block(module, w, self.block, self.scale)
        elif self.storage == "fp8-channel":
            self.tensors |= fp8_channel(module, w)
        else:
            self.tensors[f"{module}.weight"] = bf16(w)

    def plain(
        self, module: str, *shape: int, dtype: str = "BF16", norm: bool = False, part: str = "weight"
    ) -> None:
        x = self.values(*shape) + (1 if norm else 0)
        self.tensors[f"{module}.{part}"] = f32(x) if dtype == "F32" else bf16(x)
        if len(shape) == 2:
            self.plain_modules.append(module)


_STORAGE = {"glm4_moe": "fp8-channel", "kimi_k25": "int4"}
_ARCHITECTURES = {
    "glm_moe_dsa": "GlmMoeDsaForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM", "kimi_k2": "DeepseekV3ForCausalLM",
    "kimi_k25": "KimiK25ForConditionalGeneration", "qwen3_moe": "Qwen3MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM", "minimax_m2": "MiniMaxM2ForCausalLM", "mixtral": "MixtralForCausalLM",
}  # fmt: skip
_MLA = ("glm_moe_dsa", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25")
_MTP = ("glm_moe_dsa", "deepseek_v3", "deepseek_v32", "glm4_moe")
_INDEXER = ("glm_moe_dsa", "deepseek_v32")
_DENSE_FIRST = ("glm_moe_dsa", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm4_moe")
_CORRECTED = (*_DENSE_FIRST, "minimax_m2")
_BLOCK_SPARSE = ("minimax_m2", "mixtral")


def moe(
    family: str,
    *,
    storage: str | None = None,
    layers: int = 2,
    experts: int = 4,
    hidden: int = 256,
    intermediate: int = 128,
    vocab: int = 64,
    mtp: bool | None = None,
    scale: str | None = None,
    seed: int = 0,
) -> tuple[dict[str, Raw], dict[str, Any]]:
    """Tensors and config of a synthetic model under the published names of a family.

    ``storage`` is ``fp8-block``, ``fp8-channel``, ``int4`` (experts only) or ``bf16``; by default as the family
    is published (mixtral: fp8-block). ``scale`` is the dtype of block scales. ``layers`` leaves out the MTP layer.
    """
    if family not in _ARCHITECTURES:
        raise ValueError(f"unknown family {family!r}")
    storage = storage or _STORAGE.get(family, "fp8-block")
    model = _Model(storage, seed, scale or ("BF16" if family == "qwen3_moe" else "F32"))
    mtp = family in _MTP if mtp is None else mtp
    prefix = "language_model." if family == "kimi_k25" else ""
    model.plain(f"{prefix}model.embed_tokens", vocab, hidden)
    for layer in range(layers + mtp):
        dense = layer == 0 and family in _DENSE_FIRST
        _layer(model, family, f"{prefix}model.layers.{layer}", dense, experts, hidden, intermediate)
        if layer == layers:
            _mtp(model, family, f"{prefix}model.layers.{layer}", hidden, vocab)
    model.plain(f"{prefix}model.norm", hidden, norm=True)
    model.plain(f"{prefix}lm_head", vocab, hidden)
    if family == "kimi_k25":
        model.plain("vision_tower.encoder.blocks.0.wqkv", 96, 32)
        model.plain("mm_projector.proj.0", 64, 64)
    config = _config(family, layers, experts, hidden, intermediate, vocab, mtp)
    quantization = _quantization(family, model)
    if family == "kimi_k25":  # only nested, so that readers have to look there
        config["text_config"] |= quantization
        return model.tensors, config
    return model.tensors, config | quantization


def write_moe(folder: Path, family: str, *, shards: int = 3, **options: Any) -> Path:
    """``moe`` on disk with the family's way of naming files and a few side files."""
    tensors, config = moe(family, **options)
    pattern, first = "model-{number:05d}-of-{count:05d}.safetensors", 1
    if family in ("deepseek_v3", "deepseek_v32"):
        pattern = "model-{number:05d}-of-{count:06d}.safetensors"
    elif family == "kimi_k2":
        pattern = "model-{number}-of-{count}.safetensors"
    elif family == "minimax_m2":
        first = 0
    side = {
        "tokenizer_config.json": b"{}\n",
        "generation_config.json": b'{"eos_token_id": 0}\n',
        "LICENSE": b"MIT\n",
    }
    return write_checkpoint(
        folder, tensors, config, shards=shards, file_name=pattern, first=first, side_files=side
    )


def _layer(m: _Model, family: str, at: str, dense: bool, experts: int, hidden: int, intermediate: int) -> None:
    norm_dtype = "F32" if family == "deepseek_v32" else "BF16"
    m.plain(f"{at}.input_layernorm", hidden, dtype=norm_dtype, norm=True)
    if family in _MLA:
        _mla(m, family, f"{at}.self_attn", hidden, norm_dtype)
    else:
        _gqa(m, family, f"{at}.self_attn", hidden)
    m.plain(f"{at}.post_attention_layernorm", hidden, dtype=norm_dtype, norm=True)
    block = f"{at}.block_sparse_moe" if family in _BLOCK_SPARSE else f"{at}.mlp"
    if dense:
        _mlp(m, block, hidden, 2 * intermediate)
        return
    m.plain(f"{block}.gate", experts, hidden, dtype="F32" if family == "minimax_m2" else "BF16")
    if family in _CORRECTED:
        owner = block if family == "minimax_m2" else f"{block}.gate"
        m.plain(owner, experts, dtype="F32", part="e_score_correction_bias")
    names = ("w1", "w3", "w2") if family in _BLOCK_SPARSE else ("gate_proj", "up_proj", "down_proj")
    for expert in range(experts):
        _mlp(m, f"{block}.experts.{expert}", hidden, intermediate, names, expert=True)
    if family in _DENSE_FIRST:
        _mlp(m, f"{block}.shared_experts", hidden, intermediate)


def _mlp(
    m: _Model,
    at: str,
    hidden: int,
    intermediate: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    expert: bool = False,
) -> None:
    gate, up, down = names
    m.linear(f"{at}.{gate}", intermediate, hidden, expert=expert)
    m.linear(f"{at}.{up}", intermediate, hidden, expert=expert)
    m.linear(f"{at}.{down}", hidden, intermediate, expert=expert)


def _mla(m: _Model, family: str, at: str, hidden: int, norm_dtype: str) -> None:
    """Latent attention: 4 heads, ranks 128, rope 16, so that kv_a_proj_with_mqa has 144 rows = 1.125 blocks."""
    heads, rank, nope, rope, value = 4, 128, 32, 16, 32
    m.linear(f"{at}.q_a_proj", rank, hidden)
    m.plain(f"{at}.q_a_layernorm", rank, dtype=norm_dtype, norm=True)
    m.linear(f"{at}.q_b_proj", heads * (nope + rope), rank)
    m.linear(f"{at}.kv_a_proj_with_mqa", rank + rope, hidden)
    m.plain(f"{at}.kv_a_layernorm", rank, dtype=norm_dtype, norm=True)
    m.linear(f"{at}.kv_b_proj", heads * (nope + value), rank)
    m.linear(f"{at}.o_proj", hidden, heads * value)
    if family == "kimi_k2":
        m.plain(f"{at}.rotary_emb", rope // 2, part="inv_freq")
    if family in _INDEXER:
        m.linear(f"{at}.indexer.wq_b", 4 * 32, rank)
        m.linear(f"{at}.indexer.wk", 32, hidden)
        m.plain(f"{at}.indexer.k_norm", 32, dtype=norm_dtype, norm=True)
        m.plain(f"{at}.indexer.k_norm", 32, dtype=norm_dtype, part="bias")
        m.plain(f"{at}.indexer.weights_proj", 4, hidden)


def _gqa(m: _Model, family: str, at: str, hidden: int) -> None:
    """Grouped-query attention: 4 query heads and 2 key heads of 32."""
    heads, kv_heads, dim = 4, 2, 32
    for name, o in (("q_proj", heads * dim), ("k_proj", kv_heads * dim), ("v_proj", kv_heads * dim)):
        m.linear(f"{at}.{name}", o, hidden)
        if family == "glm4_moe":
            m.plain(f"{at}.{name}", o, part="bias")
    m.linear(f"{at}.o_proj", hidden, heads * dim)
    if family != "mixtral":
        whole = family == "minimax_m2"
        m.plain(f"{at}.q_norm", heads * dim if whole else dim, norm=True)
        m.plain(f"{at}.k_norm", kv_heads * dim if whole else dim, norm=True)


def _mtp(m: _Model, family: str, at: str, hidden: int, vocab: int) -> None:
    m.plain(f"{at}.enorm", hidden, norm=True)
    m.plain(f"{at}.hnorm", hidden, norm=True)
    m.plain(f"{at}.eh_proj", hidden, 2 * hidden)
    m.plain(f"{at}.shared_head.norm", hidden, norm=True)
    if family in ("deepseek_v3", "deepseek_v32"):
        m.plain(f"{at}.embed_tokens", vocab, hidden)
        m.plain(f"{at}.shared_head.head", vocab, hidden)


def _config(
    family: str, layers: int, experts: int, hidden: int, intermediate: int, vocab: int, mtp: bool
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family]], "model_type": family, "hidden_size": hidden,
        "hidden_act": "silu", "num_hidden_layers": layers, "num_attention_heads": 4, "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512, "rope_theta": 10000.0, "tie_word_embeddings": False, "dtype": "bfloat16",
        "num_experts_per_tok": min(2, experts),
    }  # fmt: skip
    if family in _MLA:
        config |= {
            "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
            "v_head_dim": 32, "num_key_value_heads": 4,
        }  # fmt: skip
    else:
        config |= {"head_dim": 32, "num_key_value_heads": 2}
    if family in _DENSE_FIRST:
        config |= {
            "n_routed_experts": experts, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
            "topk_group": 1, "moe_intermediate_size": intermediate, "intermediate_size": 2 * intermediate,
            "routed_scaling_factor": 1.5, "norm_topk_prob": True, "num_nextn_predict_layers": int(mtp),
        }  # fmt: skip
    elif family == "qwen3_moe":
        config |= {
            "num_experts": experts, "moe_intermediate_size": intermediate, "decoder_sparse_step": 1,
            "mlp_only_layers": [], "norm_topk_prob": True, "intermediate_size": 2 * intermediate,
        }  # fmt: skip
    else:
        config |= {"num_local_experts": experts, "intermediate_size": intermediate}
    if family in _INDEXER:
        config |= {"index_topk": 64, "index_n_heads": 4, "index_head_dim": 32}
    if family == "glm_moe_dsa":
        config |= {"indexer_types": ["full"] * layers, "head_dim": 16, "qk_head_dim": 48}
        config["mlp_layer_types"] = ["dense"] + ["sparse"] * (layers - 1)
    if family == "kimi_k25":
        text = config | {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
        config = {
            "architectures": [_ARCHITECTURES[family]], "model_type": family, "text_config": text,
            "vision_config": {"vt_hidden_size": 32}, "dtype": "bfloat16",
        }  # fmt: skip
    return config


def _quantization(family: str, model: _Model) -> dict[str, Any]:
    """The quantization_config as the family's publisher writes it, in the place where it stands."""
    if model.storage == "bf16":
        return {}
    if model.storage == "fp8-block":
        fp8_config: dict[str, Any] = {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
            "weight_block_size": [model.block, model.block],
        }  # fmt: skip
        if family in ("glm_moe_dsa", "qwen3_moe"):
            fp8_config["modules_to_not_convert"] = list(model.plain_modules)
        elif family == "minimax_m2":
            fp8_config |= {
                "fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]
            }  # fmt: skip
        elif family == "deepseek_v32":
            fp8_config["scale_fmt"] = "ue8m0"
        return {"quantization_config": fp8_config}
    if model.storage == "fp8-channel":
        weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
        inputs: dict[str, Any] | None = weights | {"strategy": "token", "dynamic": True}
        fmt, ignore = "float-quantized", list(model.plain_modules)
    else:
        weights = {
            "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True,
            "dynamic": False, "actorder": None, "block_structure": None,
        }  # fmt: skip
        inputs, fmt = None, "pack-quantized"
        ignore = [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        ]
    content = {
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        "format": fmt, "ignore": ignore, "kv_cache_scheme": None, "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }  # fmt: skip
    return {"quantization_config": content}
