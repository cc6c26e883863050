"""The decoder: token ids of a step to hidden states, and those to logits.

Legend: T tokens of the step, H hidden size, n tokens whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..phase import Phase
from .attention import Attention, StepContext
from .experts import FeedForward
from .norm import RmsNorm
from .ops import Ops
from .pages import Pool
from .weights import Dual, Stored


@dataclass(frozen=True)
class Layer:
    """A decoder layer: two residual branches, each behind a norm."""

    attention_norm: RmsNorm
    attention: Attention
    feed_forward_norm: RmsNorm
    feed_forward: FeedForward
    ops: Ops

    def forward(self, hidden: Tensor, step: StepContext, pools: Sequence[Pool]) -> Tensor:
        add = self.ops.add
        hidden = add(hidden, self.attention.forward(self.attention_norm(hidden), step, pools))
        return add(hidden, self.feed_forward.forward(self.feed_forward_norm(hidden), step.phase))


@dataclass(frozen=True)
class Decoder:
    """A model.

    Attributes:
        embedding: ``[V, H]`` as stored.
        layers: in order.
        norm: behind the last layer.
        head: to the logits, ``[V, H]``.
    """

    embedding: Tensor
    layers: Sequence[Layer]
    norm: RmsNorm
    head: Dual[Stored]
    ops: Ops

    def forward(self, token_ids: Tensor, step: StepContext, pools: Sequence[Sequence[Pool]]) -> Tensor:
        """What the last layer gives ``[T, H]``, not normed, for ``token_ids`` int64 ``[T]``."""
        hidden = torch.nn.functional.embedding(token_ids, self.embedding).to(self.ops.dtype)
        for layer, own in zip(self.layers, pools, strict=True):
            hidden = layer.forward(hidden, step, own)
        return hidden

    def logits(self, hidden: Tensor, phase: Phase) -> Tensor:
        """Float32 ``[n, V]`` of what the last layer gave, ``[n, H]``."""
        return self.ops.float_linear(self.norm(hidden), self.head[phase])
