"""Which tensor names mean what, per model family: a table, no algorithm (that is ``classify``).

A rule is ``(role, pattern)``; the first rule that matches the whole *module* (a name without its parameter
suffix and without the family's prefix) decides. ``{L}`` stands for the decoder layer, ``{E}`` for the routed
expert, ``{P}`` for a projection of the family. Everything else is a regular expression.

Left out on purpose: shapes, dtypes and how a weight is stored. They are read from headers, never assumed.
Source: published checkpoints (docs/format.md section 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .role import Role

Rules = tuple[tuple[Role, str], ...]

_LLAMA_NAMES: Mapping[str, str] = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
_W_NAMES: Mapping[str, str] = {"w1": "gate", "w3": "up", "w2": "down"}

_VISION: Rules = (
    (Role.VISION, r"(?:model\.)?(?:vision_tower|vision_model|visual|mm_projector|multi_modal_projector)\..*"),
)
_OUTSIDE: Rules = (
    (Role.EMBEDDING, r"model\.embed_tokens"),
    (Role.LM_HEAD, r"lm_head"),
    (Role.NORM, r"model\.norm"),
)
_MTP_ONLY: Rules = ((Role.MTP, r"model\.layers\.{L}\.(?:eh_proj|enorm|hnorm|embed_tokens|shared_head(?:\..*)?)"),)
_MLP: Rules = (
    (Role.ROUTED_EXPERT, r"model\.layers\.{L}\.mlp\.experts\.{E}\.{P}"),
    (Role.SHARED_EXPERT, r"model\.layers\.{L}\.mlp\.shared_experts\.{P}"),
    (Role.ROUTER, r"model\.layers\.{L}\.mlp\.gate"),
    (Role.DENSE_MLP, r"model\.layers\.{L}\.mlp\.{P}"),
)
_BLOCK_SPARSE: Rules = (
    (Role.ROUTED_EXPERT, r"model\.layers\.{L}\.block_sparse_moe\.experts\.{E}\.{P}"),
    (Role.ROUTER, r"model\.layers\.{L}\.block_sparse_moe(?:\.gate)?"),
)
_LAYER: Rules = (
    (Role.INDEXER, r"model\.layers\.{L}\.self_attn\.indexer(?:\..*)?"),
    (Role.OTHER, r"model\.layers\.{L}\.self_attn\.rotary_emb"),
    (Role.NORM, r"model\.layers\.{L}\.(?:.*\.)?\w*norm"),
    (Role.ATTENTION, r"model\.layers\.{L}\.self_attn\.\w+"),
)
_STANDARD: Rules = _OUTSIDE + _MTP_ONLY + _MLP + _LAYER


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        name: key used in recipes.
        model_types: values of ``model_type`` in config.json that select it.
        rules: the table, first match wins.
        projections: source spelling of an MLP's projections -> gate, up or down.
        expert_paths: how engines call the path to the experts below a layer; the first is the checkpoint's own.
            Quantization targets match all of them.
        expert_projections: how engines call the projections; targets match all of them.
        prefix: stands before ``model.`` and ``lm_head`` in tensor names.
        expert_count_keys: config keys that may hold the number of routed experts.
        keep_plain: modules (last name component) left in BF16 in the family's published FP8 checkpoints although
            their role is otherwise quantized there.
    """

    name: str
    model_types: tuple[str, ...]
    rules: Rules
    projections: Mapping[str, str] = field(default_factory=lambda: _LLAMA_NAMES)
    expert_paths: tuple[str, ...] = ("mlp",)
    expert_projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    prefix: str = ""
    expert_count_keys: tuple[str, ...] = ("n_routed_experts", "num_experts", "num_local_experts")
    keep_plain: tuple[str, ...] = ("weights_proj",)


FAMILIES: tuple[Family, ...] = (
    Family("glm_moe_dsa", ("glm_moe_dsa",), _STANDARD),
    Family("deepseek_v3", ("deepseek_v3",), _STANDARD),
    Family("deepseek_v32", ("deepseek_v32",), _STANDARD),
    Family("kimi_k2", ("kimi_k2",), _STANDARD),
    Family(
        "kimi_k25", ("kimi_k25",), _VISION + _STANDARD,
        prefix="language_model.",
    ),
    Family("qwen3_moe", ("qwen3_moe",), _STANDARD),
    Family("glm4_moe", ("glm4_moe",), _STANDARD),
    Family(
        "minimax_m2", ("minimax_m2",), _OUTSIDE + _BLOCK_SPARSE + _LAYER,
        projections=_W_NAMES, expert_paths=("block_sparse_moe", "mlp"),
        expert_projections=("w1", "w2", "w3", "gate_proj", "up_proj", "down_proj"),
    ),
    Family(
        "mixtral", ("mixtral",), _OUTSIDE + _BLOCK_SPARSE + _LAYER,
        projections=_W_NAMES, expert_paths=("block_sparse_moe", "mlp"),
        expert_projections=("w1", "w2", "w3", "gate_proj", "up_proj", "down_proj"),
    ),
)  # fmt: skip

# What an unknown family falls back to: any path, the usual words. ``{P}`` may be any of the known spellings.
_ANY = r"(?:.*\.)?"
_LAYERS = r"(?:.*\.)?(?:layers|blocks|h)\.{L}\."
GENERIC = Family(
    "generic", (),
    (
        (Role.VISION, _ANY + r"(?:vision\w*|visual|vit|mm_projector|multi_modal_projector)(?:\..*)?"),
        (Role.ROUTED_EXPERT, _LAYERS + r"(?:\w+\.)*experts\.{E}\.{P}"),
        (Role.MTP, _LAYERS + r"(?:eh_proj|enorm|hnorm|embed_tokens|shared_head(?:\..*)?)"),
        (Role.ROUTER, _LAYERS + r"(?:.*\.)?(?:gate|router|wg|shared_expert_gate)(?:\.\w+)?"),
        (Role.SHARED_EXPERT, _LAYERS + r"(?:.*\.)?shared_(?:experts?|mlp)\.(?:.*\.)?\w+"),
        (Role.INDEXER, _LAYERS + r"(?:.*\.)?indexer(?:\..*)?"),
        (Role.NORM, _ANY + r"\w*(?:norm|ln)(?:_\w+)?"),
        (Role.EMBEDDING, _ANY + r"(?:embed_tokens|wte|embeddings?|tok_embeddings|word_embeddings)"),
        (Role.LM_HEAD, _ANY + r"(?:lm_head|output|embed_out)"),
        (Role.OTHER, _LAYERS + r"(?:.*\.)?rotary_emb"),
        (Role.ATTENTION, _LAYERS + r"(?:self_)?(?:attn|attention)\.(?:.*\.)?\w+"),
        (Role.DENSE_MLP, _LAYERS + r"(?:mlp|feed_forward|ffn)\.{P}"),
    ),
    projections={**_LLAMA_NAMES, **_W_NAMES},
    expert_projections=("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"),
)  # fmt: skip
