"""Routing: which experts a token goes to, and with which weights.

Scores are the softmax or the sigmoid of a router's logits; DeepSeek-V3 adds a correction to them for the choice
only and restricts it to the best groups of experts (arXiv:2412.19437, section 2.1.2). A row's bits depend on
nothing but the row. Scores of the native code are off torch's by at most 2^-20 of their size.

Legend: T tokens, E experts, K chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import check
from .choice import implementation


def route(
    logits: Tensor,
    top_k: int,
    *,
    is_softmax: bool,
    correction: Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
    normalizes: bool = True,
    epsilon: float = 0.0,
    scaling: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The K experts with the largest scores, and their scores as weights.

    Args:
        logits: float32 ``[T, E]``, contiguous rows.
        top_k: K.
        is_softmax: scores are the softmax of the logits, else their sigmoid.
        correction: float32 ``[E]``, contiguous, added to the scores for the choice only.
        num_groups, topk_groups: experts are in groups of equal size, only those of the best ones are eligible; a
            group is as good as the sum of its two best.
        normalizes: weights are divided by their sum.
        epsilon: added to that sum.
        scaling: factor of the weights.

    Returns:
        ids int64 ``[T, K]``, none twice in a row, and weights float32 ``[T, K]``. NaN ranks highest. Which of
        equals is chosen depends on the backend.

    Raises:
        TypeError, ValueError: an argument does not fit; it is named.
    """
    check.matrix("logits", logits, torch.float32)
    experts = logits.shape[1]
    top_k, groups = check.integer("top_k", top_k), check.integer("num_groups", num_groups)
    kept = check.integer("topk_groups", topk_groups)
    if groups > 1 and (experts % groups or experts // groups < 2):
        raise ValueError(f"num_groups must divide {experts} experts into groups of two or more, got {groups}")
    if kept > groups or top_k > experts // groups * kept:
        raise ValueError(f"{top_k} experts can't be chosen of {kept} of {groups} groups of {experts // groups}")
    if correction is not None:
        check.tensor("correction", correction, torch.float32)
        check.shape("correction", correction, experts)
        check.same_device("correction", correction, logits)
        correction = correction.contiguous()
    epsilon, scaling = check.factor("epsilon", epsilon), check.factor("scaling", scaling)
    ids = logits.new_empty((len(logits), top_k), dtype=torch.int64)
    weights = logits.new_empty((len(logits), top_k))
    if logits.numel():
        implementation("route", logits).route(
            logits, is_softmax, correction, groups, kept, normalizes, epsilon, scaling, ids, weights
        )
    return ids, weights
