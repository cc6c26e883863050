"""Grouped-query attention of one layer: Qwen3-MoE, GLM-4.x-MoE, Mixtral, MiniMax-M2.

They differ in biases, in norms of queries and keys (per head, or over all heads), and in how many columns of a
head are rotated; all that is in the weights and the specification.

Legend: T tokens, H hidden size, Hq query heads, Hkv key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .attention import StepContext
from .norm import RmsNorm
from .ops import Ops
from .pages import GqaPages, Pool
from .rope import rotate_halves
from .spec import ModelSpec
from .weights import Weights


class GqaAttention:
    """See ``Attention``."""

    def __init__(self, spec: ModelSpec, weights: Weights, ops: Ops) -> None:
        """
        Args:
            weights: below ``self_attn``.

        Raises:
            SourceError: a weight is missing.
        """
        self._heads, self._kv_heads, self._dim = spec.shape.heads, spec.shape.kv_heads, spec.shape.head_dim or 0
        self.kinds: Sequence[GqaPages] = (GqaPages(self._kv_heads, self._dim),)
        self.derived_bytes = 0
        self._ops = ops
        self._q, self._k = weights.linear("q_proj"), weights.linear("k_proj")
        self._v, self._o = weights.linear("v_proj"), weights.linear("o_proj")
        self._norms: tuple[RmsNorm, RmsNorm] | None = None
        self._norms_heads = spec.qk_norm == "head"
        if spec.qk_norm != "none":
            q, k = (
                RmsNorm(weights.tensor(f"{name}.weight"), spec.norm_eps, ops.dtype)
                for name in ("q_norm", "k_norm")
            )
            self._norms = q, k

    def forward(self, hidden: Tensor, step: StepContext, pools: Sequence[Pool]) -> Tensor:
        ops, phase = self._ops, step.phase
        query, key = ops.linear(hidden, self._q[phase]), ops.linear(hidden, self._k[phase])
        if self._norms and not self._norms_heads:
            query, key = self._norms[0](query), self._norms[1](key)
        query, key = query.view(-1, self._heads, self._dim), key.view(-1, self._kv_heads, self._dim)
        if self._norms and self._norms_heads:
            query, key = self._norms[0](query), self._norms[1](key)
        query, key = rotate_halves(query, step.angles), rotate_halves(key, step.angles)
        value = ops.linear(hidden, self._v[phase]).view(-1, self._kv_heads, self._dim)
        out = ops.gqa(query, key, value, pools[0], step, self._dim**-0.5)
        return ops.linear(out.reshape(len(hidden), -1), self._o[phase])
