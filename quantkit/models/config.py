"""Typed view of the part of a ``config.json`` that sizes depend on.

Families spell the same number differently (``n_routed_experts``, ``num_experts``, ``num_local_experts``), nest
it (Kimi K2.5 in ``text_config``) or state something misleading next to it (GLM-5.2 says ``head_dim: 192``, which
nothing in the model has). Here each number gets one name, once; everything else that computes with a config
(KV cache, engine rules, capacity) reads this and not the dict. What is left out: names of tensors (the family
table) and anything that only matters for running the model.

Sources: transformers 5.17 configuration classes; the published configs of the families in the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import SourceError


@dataclass(frozen=True, slots=True)
class MlaShape:
    """Multi-head latent attention: ``kv_lora_rank`` latent and ``rope`` shared key channels per token."""

    kv_lora_rank: int
    rope: int
    nope: int
    value: int
    q_lora_rank: int | None


@dataclass(frozen=True, slots=True)
class IndexerShape:
    """DSA's lightning indexer: one key of ``head_dim`` channels per token on each of ``layers``."""

    head_dim: int
    heads: int
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TextShape:
    """The numbers of the language model.

    ``layers`` counts decoder layers without multi-token-prediction layers. ``head_dim`` is None with MLA, whose
    heads have several widths (``mla``). ``experts`` is 0 for a dense model.
    """

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int | None
    mla: MlaShape | None
    indexer: IndexerShape | None
    experts: int
    top_k: int
    shared_experts: int
    moe_intermediate: int
    dense_intermediate: int
    dense_layers: int


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config: ``text_config`` where there is one, else the config itself."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """``quantization_config`` of a config, looked for at the top and in ``text_config``; None when unquantized."""
    for place in (config, text_config(config)):
        found = place.get("quantization_config")
        if isinstance(found, Mapping):
            return found
    return None


def text_shape(config: Mapping[str, Any]) -> TextShape:
    """Read the numbers from a ``config.json``.

    Raises:
        SourceError: a number that every model has is missing or is not a positive integer.
    """
    text = text_config(config)
    hidden, heads, layers = (_need(text, k) for k in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    mla = _mla(text)
    experts = _first(text, "n_routed_experts", "num_experts", "num_local_experts") or 0
    dense = _first(text, "intermediate_size") or 0
    kv_heads = _first(text, "num_key_value_heads") or heads
    return TextShape(
        model_type=str(text.get("model_type") or config.get("model_type") or "unknown"),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=None if mla else _first(text, "head_dim") or hidden // heads,
        mla=mla,
        indexer=_indexer(text, layers),
        experts=experts,
        top_k=(_first(text, "num_experts_per_tok") or 0) if experts else 0,
        shared_experts=(_first(text, "n_shared_experts") or 0) if experts else 0,
        # MiniMax and Mixtral have no dense MLP and call the experts' width intermediate_size.
        moe_intermediate=(_first(text, "moe_intermediate_size") or dense) if experts else 0,
        dense_intermediate=dense,
        dense_layers=_dense_layers(text, layers, experts),
    )


def _mla(text: Mapping[str, Any]) -> MlaShape | None:
    if not text.get("kv_lora_rank"):
        return None
    return MlaShape(
        kv_lora_rank=_need(text, "kv_lora_rank"),
        rope=_need(text, "qk_rope_head_dim"),
        nope=_need(text, "qk_nope_head_dim"),
        value=_need(text, "v_head_dim"),
        q_lora_rank=_first(text, "q_lora_rank"),
    )


def _indexer(text: Mapping[str, Any], layers: int) -> IndexerShape | None:
    head_dim = _first(text, "index_head_dim")
    if head_dim is None:
        return None
    types = text.get("indexer_types")
    # GLM-5.2 runs an indexer on some layers and lets the next ones share its choice; DeepSeek-V3.2 and GLM-5.1
    # have no such list and run one on every layer.
    full = [i for i, t in enumerate(types) if t == "full"] if isinstance(types, (list, tuple)) else range(layers)
    return IndexerShape(head_dim, _first(text, "index_n_heads") or 1, tuple(i for i in full if i < layers))


def _dense_layers(text: Mapping[str, Any], layers: int, experts: int) -> int:
    if not experts:
        return layers
    types = text.get("mlp_layer_types")
    if isinstance(types, (list, tuple)):
        return sum(t == "dense" for t in types[:layers])
    if isinstance(text.get("mlp_only_layers"), (list, tuple)):
        return len(text["mlp_only_layers"])
    return _first(text, "first_k_dense_replace") or 0


def _first(text: Mapping[str, Any], *keys: str) -> int | None:
    """The first of ``keys`` that holds a positive integer."""
    for key in keys:
        value = text.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _need(text: Mapping[str, Any], key: str) -> int:
    value = _first(text, key)
    if value is None:
        raise SourceError(
            f"{key} is {text.get(key)!r}", where="config.json", accepted="a positive integer",
            hint="Sizes of the KV cache and engine rules need it.",
        )  # fmt: skip
    return value
