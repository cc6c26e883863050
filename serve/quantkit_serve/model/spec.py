"""What config.json says of running a model, each number under one name.

``quantkit.models.config`` has what sizes depend on; this adds what computing needs. Sources: the configuration
classes and models of transformers 5.17. A setting that would change results and is not computed here is refused,
never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from quantkit.errors import SourceError, UnsupportedError
from quantkit.models.config import TextShape, text_config, text_shape

from .rope import Rope, rope_of

FAMILIES = (
    "glm_moe_dsa", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "qwen3_moe", "glm4_moe", "minimax_m2",
    "mixtral",
)  # fmt: skip
_GROUPED = ("glm_moe_dsa", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm4_moe")


@dataclass(frozen=True)
class RouterSpec:
    """How experts are chosen.

    Attributes:
        kind: scores by ``softmax`` or ``sigmoid``.
        top_k: experts of a token.
        num_groups, topk_groups: only the experts of the best groups are eligible; 1 and 1: all.
        normalizes: the weights of a token are divided by their sum.
        epsilon: added to that sum.
        scaling: factor of the weights.
    """

    kind: Literal["softmax", "sigmoid"]
    top_k: int
    num_groups: int = 1
    topk_groups: int = 1
    normalizes: bool = True
    epsilon: float = 0.0
    scaling: float = 1.0


@dataclass(frozen=True)
class ModelSpec:
    """A model.

    Attributes:
        family: of the family table.
        shape: sizes.
        text: the language model's part of config.json, for what one kind of attention alone needs.
        vocab_size: rows of the embedding.
        max_model_len: positions that it was trained for.
        norm_eps: of all RMS norms.
        rope: rotary embedding.
        router: of its sparse layers.
        is_sparse: for each decoder layer, whether it has routed experts.
        qk_norm: queries and keys are normed per ``head``, over all heads (``whole``), or not.
        ties_embeddings: the language model head is the embedding.
    """

    family: str
    shape: TextShape
    text: Mapping[str, Any]
    vocab_size: int
    max_model_len: int
    norm_eps: float
    rope: Rope
    router: RouterSpec
    is_sparse: tuple[bool, ...]
    qk_norm: Literal["none", "head", "whole"]
    ties_embeddings: bool


def model_spec(config: Mapping[str, Any], family: str) -> ModelSpec:
    """Read a ``config.json``.

    Raises:
        SourceError: a number is missing or can't be right.
        UnsupportedError: a model that can't be run here.
    """
    if family not in FAMILIES:
        raise UnsupportedError(
            f"family {family!r} can't be served", where="config.json", accepted=", ".join(FAMILIES)
        )
    text, shape = text_config(config), text_shape(config)
    _refuse_strangers(text, family)
    return ModelSpec(
        family=family,
        shape=shape,
        text=text,
        vocab_size=_number(text, "vocab_size"),
        max_model_len=_number(text, "max_position_embeddings"),
        norm_eps=float(
            text.get("rms_norm_eps", 1e-5 if family in ("glm4_moe", "mixtral", "glm_moe_dsa") else 1e-6)
        ),
        rope=_rope(text, shape, family),
        router=_router(text, shape, family),
        is_sparse=_sparse(text, shape, family),
        qk_norm=_qk_norm(text, family),
        ties_embeddings=bool(text.get("tie_word_embeddings", False)),
    )


def _rope(text: Mapping[str, Any], shape: TextShape, family: str) -> Rope:
    dim = shape.mla.rope if shape.mla is not None else shape.head_dim or 0
    return rope_of(text, dim, partial=0.5 if family == "glm4_moe" else 1.0)


def _router(text: Mapping[str, Any], shape: TextShape, family: str) -> RouterSpec:
    """
    Raises:
        SourceError: a router that could choose for no token.
    """
    groups, kept = _groups(text, shape) if family in _GROUPED else (1, 1)
    eligible = shape.experts // groups * kept
    if shape.experts and not 1 <= shape.top_k <= eligible:
        raise SourceError(
            f"num_experts_per_tok is {text.get('num_experts_per_tok')!r}, of {eligible} eligible experts",
            where="config.json", accepted=f"1 to {eligible}",
        )  # fmt: skip
    if family == "qwen3_moe":
        return RouterSpec("softmax", shape.top_k, normalizes=bool(text.get("norm_topk_prob", False)))
    if family == "mixtral":
        return RouterSpec("softmax", shape.top_k)
    if family == "minimax_m2":
        return RouterSpec("sigmoid", shape.top_k)
    return RouterSpec(
        "sigmoid",
        shape.top_k,
        num_groups=groups,
        topk_groups=kept,
        normalizes=bool(text.get("norm_topk_prob", True)),
        epsilon=1e-20,
        scaling=float(text.get("routed_scaling_factor", 1.0 if family == "glm4_moe" else 2.5)),
    )


def _groups(text: Mapping[str, Any], shape: TextShape) -> tuple[int, int]:
    """How many groups of experts there are, and how many of them a token may use; all of one if there is one."""
    groups = _number(text, "n_group") if text.get("n_group") is not None else 1
    if groups == 1 or not shape.experts:
        return 1, 1
    if shape.experts % groups or shape.experts // groups < 2:
        raise SourceError(
            f"n_group is {groups}, of {shape.experts} experts", where="config.json",
            accepted="a number that divides them into groups of two or more",
        )  # fmt: skip
    kept = _number(text, "topk_group") if text.get("topk_group") is not None else 1
    if kept > groups:
        raise SourceError(f"topk_group is {kept}", where="config.json", accepted=f"at most the {groups} groups")
    return groups, kept


def _sparse(text: Mapping[str, Any], shape: TextShape, family: str) -> tuple[bool, ...]:
    layers = range(shape.layers)
    if not shape.experts:
        return (False,) * shape.layers
    types = text.get("mlp_layer_types")
    if isinstance(types, (list, tuple)):
        if len(types) < shape.layers:
            raise SourceError(
                f"mlp_layer_types names {len(types)} layers", where="config.json", accepted=f"{shape.layers}"
            )
        return tuple(types[layer] == "sparse" for layer in layers)
    if family == "qwen3_moe":
        dense, step = text.get("mlp_only_layers") or (), int(text.get("decoder_sparse_step") or 1)
        return tuple(layer not in dense and (layer + 1) % step == 0 for layer in layers)
    if family in _GROUPED:
        first = text.get("first_k_dense_replace")
        default = {"glm4_moe": 1}.get(family, 3)
        return tuple(layer >= (default if first is None else int(first)) for layer in layers)
    return (True,) * shape.layers


def _qk_norm(text: Mapping[str, Any], family: str) -> Literal["none", "head", "whole"]:
    if family == "minimax_m2":
        return "whole"
    has = family == "qwen3_moe" or (family == "glm4_moe" and bool(text.get("use_qk_norm", False)))
    return "head" if has else "none"


def _refuse_strangers(text: Mapping[str, Any], family: str) -> None:
    """Settings that change results and that nothing here computes."""
    windows = text.get("sliding_window") if family == "mixtral" or text.get("use_sliding_window") else None
    for key, value, accepted in (
        ("hidden_act", text.get("hidden_act", "silu"), "silu"),
        ("sliding_window", windows, None),
        ("moe_layer_freq", text.get("moe_layer_freq", 1), 1),
        ("scoring_func", text.get("scoring_func", "sigmoid") if family in _GROUPED else "sigmoid", "sigmoid"),
    ):
        if value != accepted:
            raise UnsupportedError(f"{key} is {value!r}", where="config.json", accepted=repr(accepted))


def _number(text: Mapping[str, Any], key: str) -> int:
    value = text.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SourceError(f"{key} is {value!r}", where="config.json", accepted="a positive integer")
    return value
