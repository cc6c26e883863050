"""What a tensor is for in a Mixture-of-Experts model, read from its name by a family's table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Role(str, Enum):
    """The purpose of a tensor; sizes and policies are reported by it."""

    ROUTED_EXPERT = "routed_expert"
    SHARED_EXPERT = "shared_expert"
    DENSE_MLP = "dense_mlp"
    ATTENTION = "attention"
    INDEXER = "indexer"
    ROUTER = "router"
    NORM = "norm"
    EMBEDDING = "embedding"
    LM_HEAD = "lm_head"
    MTP = "mtp"  # what only a multi-token-prediction layer has: eh_proj, enorm, hnorm, shared_head
    VISION = "vision"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class TensorRole:
    """A classified tensor name.

    Attributes:
        role: purpose.
        module: name without the parameter suffix (``.weight``, ``.weight_scale_inv``, ...).
        part: the suffix without its dot: weight, weight_scale_inv, weight_scale, weight_packed, weight_shape,
            bias, e_score_correction_bias, ...
        layer: decoder layer index, or None.
        expert: routed expert index, or None.
        projection: ``gate``, ``up`` or ``down`` for MLPs and experts (w1/w3/w2 included), or the last name
            component for other linears, or None.
        is_mtp: the tensor belongs to a multi-token-prediction layer.
    """

    role: Role
    module: str
    part: str
    layer: int | None = None
    expert: int | None = None
    projection: str | None = None
    is_mtp: bool = False
