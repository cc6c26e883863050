"""The linear modules of a model, one representative per kind, and how tensor parallelism cuts each of them.

Engine rules are divisibility rules: how many rows or columns of a weight each GPU gets. Layers of a kind have
the same shape, so one of each is enough. Engines merge some projections into one matrix (``merged``): those must
share a format. Source: SGLang and vLLM ``models/deepseek_v2.py``, ``qwen3_moe.py``, ``minimax_m2.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .config import MlaShape, TextShape, text_config, text_shape
from .families import FAMILIES, GENERIC, Family


class Cut(str, Enum):
    """What tensor parallelism divides."""

    OUT = "out"  # column-parallel: output features are divided
    IN = "in"  # row-parallel: input features are divided
    NONE = "none"  # every GPU holds the whole weight
    KV = "kv"  # output features are divided by KV heads, repeated when there are fewer than GPUs


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight ``[out, in]``.

    Attributes:
        module: a real module name of this kind.
        group: ``attention``, ``dense_mlp``, ``shared_expert``, ``routed_expert`` or ``mtp_expert``.
        merged: modules with the same non-empty value become one matrix in an engine.
        unit: rows that are never divided (a head), 1 if any row may be.
    """

    module: str
    group: str
    out_features: int
    in_features: int
    cut: Cut
    merged: str = ""
    unit: int = 1

    def per_gpu(self, tp: int) -> tuple[int, int] | None:
        """Rows and columns on each of ``tp`` GPUs; None when they cannot be divided evenly."""
        out, into = self.out_features, self.in_features
        if self.cut is Cut.OUT:
            return (out // tp, into) if out % (tp * self.unit) == 0 else None
        if self.cut is Cut.IN:
            return (out, into // tp) if into % tp == 0 else None
        if self.cut is Cut.KV:
            heads = out // self.unit
            return (self.unit * max(1, heads // tp), into) if heads % tp == 0 or tp % heads == 0 else None
        return out, into


def family_of(config: Mapping[str, Any]) -> Family:
    """The family table for a config's ``model_type``; the generic one when it is unknown."""
    types = (config.get("model_type"), text_config(config).get("model_type"))
    return next((f for t in types for f in FAMILIES if t in f.model_types), GENERIC)


def linears(config: Mapping[str, Any]) -> tuple[Linear, ...]:
    """One linear of each kind; routed experts of the first MoE layer and of the first MTP layer.

    Raises:
        SourceError: the config lacks a number this needs.
    """
    shape, family = text_shape(config), family_of(config)
    layer = f"{family.prefix}model.layers."
    sparse = f"{layer}{shape.dense_layers}."
    found = list(_attention(shape, f"{sparse if shape.experts else layer + '0.'}self_attn."))
    names: dict[str, str] = {}
    for spelling, meaning in family.projections.items():
        names.setdefault(meaning, spelling)
    if shape.dense_layers and shape.dense_intermediate:
        found += _mlp(names, f"{layer}0.mlp.", "dense_mlp", shape.hidden, shape.dense_intermediate)
    if shape.experts:
        path = f"{family.expert_paths[0]}.experts.0."
        found += _mlp(names, f"{sparse}{path}", "routed_expert", shape.hidden, shape.moe_intermediate)
        if shape.shared_experts:
            width = shape.moe_intermediate * shape.shared_experts
            found += _mlp(names, f"{sparse}mlp.shared_experts.", "shared_expert", shape.hidden, width)
        if text_config(config).get("num_nextn_predict_layers"):
            mtp = f"{layer}{shape.layers}."
            found += _mlp(names, f"{mtp}{path}", "mtp_expert", shape.hidden, shape.moe_intermediate)
    return tuple(found)


def _attention(shape: TextShape, path: str) -> tuple[Linear, ...]:
    if shape.mla is not None:
        return _latent_attention(shape, shape.mla, path)
    head_dim = shape.head_dim or 0
    q, kv = shape.heads * head_dim, shape.kv_heads * head_dim
    return (
        Linear(path + "q_proj", "attention", q, shape.hidden, Cut.OUT, path + "qkv", head_dim),
        Linear(path + "k_proj", "attention", kv, shape.hidden, Cut.KV, path + "qkv", head_dim),
        Linear(path + "v_proj", "attention", kv, shape.hidden, Cut.KV, path + "qkv", head_dim),
        Linear(path + "o_proj", "attention", shape.hidden, q, Cut.IN),
    )


def _latent_attention(shape: TextShape, mla: MlaShape, path: str) -> tuple[Linear, ...]:
    query = mla.nope + mla.rope
    kv_a = Linear(
        path + "kv_a_proj_with_mqa",
        "attention",
        mla.kv_lora_rank + mla.rope,
        shape.hidden,
        Cut.NONE,
        path + "qkv_a",
    )
    kv_out, kv_unit = shape.heads * (mla.nope + mla.value), mla.nope + mla.value
    tail = (
        kv_a,
        Linear(path + "kv_b_proj", "attention", kv_out, mla.kv_lora_rank, Cut.OUT, "", kv_unit),
        Linear(path + "o_proj", "attention", shape.hidden, shape.heads * mla.value, Cut.IN),
    )
    if mla.q_lora_rank is None:
        return (Linear(path + "q_proj", "attention", shape.heads * query, shape.hidden, Cut.OUT, "", query), *tail)
    return (
        Linear(path + "q_a_proj", "attention", mla.q_lora_rank, shape.hidden, Cut.NONE, path + "qkv_a"),
        Linear(path + "q_b_proj", "attention", shape.heads * query, mla.q_lora_rank, Cut.OUT, "", query),
        *tail,
    )


def _mlp(names: Mapping[str, str], path: str, group: str, hidden: int, width: int) -> tuple[Linear, ...]:
    return (
        Linear(path + names["gate"], group, width, hidden, Cut.OUT, path + "gate_up"),
        Linear(path + names["up"], group, width, hidden, Cut.OUT, path + "gate_up"),
        Linear(path + names["down"], group, hidden, width, Cut.IN),
    )
