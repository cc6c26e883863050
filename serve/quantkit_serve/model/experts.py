"""The feed-forward part of a layer: a dense SwiGLU, or a router with routed and shared experts.

Routing is computed in float32 from the hidden states on (transformers rounds the logits and weights of Qwen3-MoE,
Mixtral and MiniMax-M2 to bfloat16 in between).

Legend: T tokens, H hidden size, E experts, K chosen, G groups of experts.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..phase import Phase
from .ops import Ops
from .spec import RouterSpec
from .weights import Dual, ExpertSet, Stored


class FeedForward(Protocol):
    def forward(self, hidden: Tensor, phase: Phase) -> Tensor:
        """From normed hidden states ``[T, H]`` to what is added to the residual."""


class SwiGlu:
    """``down(silu(gate x) * up x)``: a dense layer, or the shared experts; computed as a single expert."""

    def __init__(self, expert: Dual[ExpertSet], ops: Ops) -> None:
        self._expert, self._ops = expert, ops

    def forward(self, hidden: Tensor, phase: Phase) -> Tensor:
        ids = torch.zeros((len(hidden), 1), dtype=torch.int64)
        return self._ops.experts(hidden, ids, torch.ones(ids.shape), self._expert[phase])


class Router:
    """Chooses experts of each token and weighs them.

    Args:
        weight: ``[E, H]``.
        correction: float32 ``[E]``, added to the scores for the choice only (DeepSeek-V3), or None.
    """

    def __init__(self, spec: RouterSpec, weight: Dual[Stored], correction: Tensor | None, ops: Ops) -> None:
        self._spec, self._weight, self._ops = spec, weight, ops
        self._correction = None if correction is None else correction.float()

    def __call__(self, hidden: Tensor, phase: Phase) -> tuple[Tensor, Tensor]:
        """Ids int64 ``[T, K]`` and weights float32 ``[T, K]``."""
        spec = self._spec
        logits = self._ops.float_linear(hidden, self._weight[phase])
        return self._ops.route(logits, spec, self._correction)


class MixtureOfExperts:
    """Routed experts, plus shared ones where there are some."""

    def __init__(self, router: Router, experts: Dual[ExpertSet], shared: SwiGlu | None, ops: Ops) -> None:
        self._router, self._experts, self._shared, self._ops = router, experts, shared, ops

    def forward(self, hidden: Tensor, phase: Phase) -> Tensor:
        ids, weights = self._router(hidden, phase)
        routed = self._ops.experts(hidden, ids, weights, self._experts[phase])
        if self._shared is None:
            return routed
        return self._ops.add(routed, self._shared.forward(hidden, phase))
