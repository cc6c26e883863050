"""The architectures of the bundled models: GLM-5.2 and Qwen3-MoE as transformers has them, scaled down.

Sizes are chosen so that everything that is special in the large models occurs in the small one: partial FP8 blocks
(144 rows in ``kv_a_proj_with_mqa``), one dense layer before sparse ones, DSA indexers on some layers only,
contexts longer than ``index_topk``, a multi-token-prediction (MTP) layer. ``smoke`` is a still smaller one for a
test of the scripts.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

ARCHITECTURES = ("glm", "qwen3")


@dataclass(frozen=True)
class Size:
    """What differs between the bundled models and the smoke test."""

    hidden: int = 256
    intermediate: int = 512
    expert: int = 128
    num_experts: int = 16
    num_layers: int = 6
    vocab: int = 4096


BUNDLED = Size()
SMOKE = Size(hidden=64, intermediate=128, expert=64, num_experts=4, num_layers=2, vocab=320)


def make_config(architecture: str, vocab_size: int, size: Size = BUNDLED) -> Any:
    """Configuration of ``glm`` or ``qwen3``."""
    shared = {
        "vocab_size": vocab_size,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "moe_intermediate_size": size.expert,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": 8,
        "num_experts_per_tok": min(4, size.num_experts),
        "norm_topk_prob": True,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "eos_token_id": 0,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    return _glm(shared, size) if architecture == "glm" else _qwen3(shared, size)


def _glm(shared: dict[str, Any], size: Size) -> Any:
    from transformers import GlmMoeDsaConfig

    return GlmMoeDsaConfig(
        **shared,
        num_key_value_heads=8,
        n_shared_experts=1,
        n_routed_experts=size.num_experts,
        routed_scaling_factor=1.5,
        kv_lora_rank=128,
        q_lora_rank=128,
        qk_rope_head_dim=16,
        v_head_dim=32,
        qk_nope_head_dim=32,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        index_topk=64,
        index_head_dim=32,
        index_n_heads=4,
        indexer_types=["full", "full", "shared", "full", "shared", "shared"][: size.num_layers],
    )


def _qwen3(shared: dict[str, Any], size: Size) -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        **shared,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=size.num_experts,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        router_aux_loss_coef=0.01,
        output_router_logits=True,
    )


class Mtp(nn.Module):
    """The MTP layer of GLM-5.2: predicts the token after the next from a hidden state and the next token.

    transformers has no module for it; this one holds the published tensors (eh_proj, enorm, hnorm, a decoder
    layer, shared_head.norm) and shares embedding and head with the model.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaDecoderLayer, GlmMoeDsaRMSNorm

        extended = copy.deepcopy(config)
        extended.indexer_types = [*config.indexer_types, "full"]
        extended.mlp_layer_types = [*config.mlp_layer_types, "sparse"]
        hidden = config.hidden_size
        self.layer: Any = GlmMoeDsaDecoderLayer(extended, config.num_hidden_layers)
        self.enorm, self.hnorm, self.norm = (GlmMoeDsaRMSNorm(hidden, config.rms_norm_eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)


def make_model(architecture: str, config: Any) -> tuple[Any, Mtp | None]:
    """A freshly initialised model (normal, 0.02) and, for GLM, its MTP layer."""
    from transformers import GlmMoeDsaForCausalLM, Qwen3MoeForCausalLM

    model: Any = GlmMoeDsaForCausalLM(config) if architecture == "glm" else Qwen3MoeForCausalLM(config)
    mtp = Mtp(config) if architecture == "glm" else None
    with torch.no_grad():
        for module in (model, mtp) if mtp else (model,):
            for parameter in module.parameters():
                if parameter.dim() >= 2:
                    parameter.normal_(0, 0.02)
        if mtp:
            mtp.layer.mlp.gate.e_score_correction_bias.zero_()
    return model, mtp
