"""The multi-token-prediction layer: from a token's hidden state and the token after it to the one after that.

DeepSeek-V3 report (arXiv:2412.19437), section 2.2, as ``quantkit.calibration.mtp`` has it::

    h'_i = layer(eh_proj [enorm(embedding of token i + 1); hnorm(h_i)])
    logits of token i + 2 = head(norm(h'_i))

h is what the model gives behind its final norm. ``layer`` is a decoder layer with pages of its own, in which token
i + 1 counts as position i. Applied again, h' behind ``shared_head.norm`` takes the place of h: the same layer for
every further token, as engines do it with checkpoints that have but one.

The weights are those of the decode view in both phases, also over prompts: what prompts leave in the layer's
pages is then the same whoever computes it, and no second set is loaded. Steps of it are decode steps for the same
reason.

GLM-5.2's ``index_share_for_mtp_iteration``, which lets repeated applications attend where the first one did, is
not followed; the indexer chooses anew.

Legend: T tokens, H hidden size, n tokens whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .attention import StepContext
from .decoder import Layer
from .norm import RmsNorm
from .ops import Ops
from .pages import Pool
from .weights import Linear, Stored


@dataclass(frozen=True)
class PredictionLayer:
    """See the module.

    Attributes:
        embedding: ``[V, H]`` as stored; the model's, or a copy of its own (DeepSeek).
        embedding_norm, hidden_norm: ``enorm`` and ``hnorm``.
        entry: ``eh_proj``, ``[H, 2H]``.
        layer: the decoder layer.
        norm: ``shared_head.norm``.
        head: to the logits, ``[V, H]``; the model's, or a copy of its own.
    """

    embedding: Tensor
    embedding_norm: RmsNorm
    hidden_norm: RmsNorm
    entry: Linear
    layer: Layer
    norm: RmsNorm
    head: Stored
    ops: Ops

    def forward(self, token_ids: Tensor, hidden: Tensor, step: StepContext, pools: Sequence[Pool]) -> Tensor:
        """``[T, H]`` behind ``norm``.

        Args:
            token_ids: int64 ``[T]``, of the token after each.
            hidden: ``[T, H]``, normed: of each token.
            step: of the decode phase, positions of each token.
        """
        embedded = torch.nn.functional.embedding(token_ids, self.embedding).to(self.ops.dtype)
        joined = torch.cat([self.embedding_norm(embedded), self.hidden_norm(hidden)], -1)
        return self.norm(self.layer.forward(self.ops.linear(joined, self.entry), step, pools))

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 ``[n, V]`` of what ``forward`` gave, ``[n, H]``."""
        return self.ops.float_linear(hidden, self.head)
