"""The operations that a model is made of, in two implementations.

``KernelOps`` computes in bfloat16 with ``quantkit_kernels.forward``; ``ReferenceOps`` in float32 with plain torch
on dequantized weights: the mode for comparisons with transformers. The parts of the model are written once
against this protocol.

Attention operations store the run's own tokens first and then attend, from the pages (``rounded``, and always in
decode steps) or with the run's tokens as they were given (``fresh``, prefill only).

Legend: T tokens of the step, H heads, D head size, O outputs, I inputs, E experts, K chosen.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from quantkit_kernels.forward.checked_table import ChosenPositions

from .attention import StepContext
from .pages import Layout, PageKind, Pool
from .spec import RouterSpec
from .weights import ExpertSet, Linear, Stored


class Ops(Protocol):
    """Attributes:
    dtype: of hidden states: bfloat16 or float32.
    """

    dtype: torch.dtype

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """``[..., I]`` to ``[..., O]``, both of ``dtype``; inputs of FP8 weights are rounded if so configured."""

    def float_linear(self, x: Tensor, weight: Stored) -> Tensor:
        """``x W^T`` in float32: routers, indexer weights, logits. x ``[..., I]`` of ``dtype``."""

    def dense(self, weight: Stored) -> Tensor:
        """The numbers of a weight, ``[O, I]`` of ``dtype``; a new tensor at every call unless it is stored so."""

    def per_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """``x[t, h] weight[h]^T``: x ``[T, H, I]`` (any strides), weight ``[H, O, I]``, contiguous rows."""

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """``a + b``, both of ``dtype`` and one shape."""

    def route(self, logits: Tensor, spec: RouterSpec, correction: Tensor | None) -> tuple[Tensor, Tensor]:
        """Ids int64 ``[T, K]`` and weights float32 ``[T, K]`` of a router's logits, float32 ``[T, E]``.

        Args:
            correction: float32 ``[E]``, added to the scores for the choice only.
        """

    def experts(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: ExpertSet) -> Tensor:
        """Sum over a token's experts of weight * SwiGLU; x ``[T, I]``, ids int64 ``[T, K]``, weights float32."""

    def layout(self, kind: PageKind) -> Layout:
        """How pages of a kind lie in memory."""

    def gqa(
        self, query: Tensor, key: Tensor, value: Tensor, pool: Pool, step: StepContext, scale: float
    ) -> Tensor:
        """Grouped-query attention: query ``[T, H, D]``, key and value ``[T, Hkv, D]``, rotated; ``[T, H, D]``."""

    def mla(
        self,
        query_latent: Tensor,
        query_rope: Tensor,
        latent: Tensor,
        rope: Tensor,
        pool: Pool,
        step: StepContext,
        scale: float,
        *,
        is_sparse: bool = False,
    ) -> Tensor:
        """Absorbed latent attention.

        Args:
            query_latent, query_rope: ``[T, H, latent]`` and ``[T, H, rope]``.
            latent, rope: of the run's tokens, ``[T, latent]`` and ``[T, rope]``, normed and rotated.
            is_sparse: attend to ``step.topk`` only.

        Returns:
            ``[T, H, latent]``.
        """

    def store_index(self, key: Tensor, pool: Pool, step: StepContext) -> None:
        """Stores the run's index keys ``[T, D]``, rotated."""

    def index(
        self, query: Tensor, head_weights: Tensor, pool: Pool, step: StepContext, k: int
    ) -> Tensor | ChosenPositions:
        """Positions chosen by the DSA indexer: int32 ``[T, K]``, ascending, then -1; K = k or the longest context.

        score(t, s) = sum over heads of head_weights[t, h] * relu(query[t, h] . key[s]). Keys are read from the
        pages, whatever ``prefill_kv`` says.

        Args:
            query: ``[T, Hi, D]``, rotated.
            head_weights: float32 ``[T, Hi]``, with all positive factors.
        """
