"""Reference of ``forward/route.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from .elementwise import sigmoid


def route(
    logits: Tensor,
    is_softmax: bool,
    correction: Tensor | None,
    groups: int,
    topk_groups: int,
    normalizes: bool,
    epsilon: float,
    scaling: float,
    ids: Tensor,
    weights: Tensor,
) -> None:
    scores = logits.softmax(-1) if is_softmax else sigmoid(logits)
    choice = scores if correction is None else scores + correction
    if groups > 1:
        choice = _eligible(choice, groups, topk_groups)
    ids.copy_(choice.topk(ids.shape[1], -1).indices)
    chosen = scores.gather(1, ids)
    if normalizes:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + epsilon)
    torch.mul(chosen, scaling, out=weights)


def _eligible(choice: Tensor, groups: int, topk_groups: int) -> Tensor:
    """Experts outside of the best groups at -inf."""
    grouped = choice.view(len(choice), groups, -1)
    best = grouped.topk(2, -1).values.sum(-1).topk(topk_groups, -1).indices
    keeps = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, True)
    return grouped.masked_fill(~keeps[..., None], -torch.inf).view_as(choice)
