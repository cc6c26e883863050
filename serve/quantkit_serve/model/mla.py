"""Multi-head latent attention of one layer, dense or with DSA: DeepSeek-V3, Kimi K2, DeepSeek-V3.2, GLM-5.x.

Pages hold one latent and one rotated key per token, shared by all heads (DeepSeek-V2, arXiv:2405.04434).
``kv_b_proj`` would expand the latent to keys and values of every head; instead its two halves are multiplied into
query and output (absorbed), in both phases, so that attention reads nothing but pages:

    q_nope . (W_UK latent) = (W_UK^T q_nope) . latent        sum p (W_UV latent) = W_UV (sum p latent)

W_UK and W_UV are derived once when the model is loaded, in bfloat16 from stored FP8 (nearest even of code *
scale); the stored ``kv_b_proj`` is not read again. Where both weight sets hold the same one they exist once.
Their inputs are not rounded with ``fp8_activations``: no engine quantizes the absorbed products.

The norms of the two latents use 1e-6 whatever ``rms_norm_eps`` says, as transformers does (GLM-5.x says 1e-5; vLLM
takes that).

Legend: T tokens, H hidden size, h heads, L columns of the latent (kv_lora_rank), N and R columns of a head's query
without and with position (qk_nope_head_dim, qk_rope_head_dim), V columns of a head's value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quantkit.errors import SourceError
from quantkit.models.config import MlaShape, text_shape

from .attention import StepContext
from .indexer import Indexer, expect_rows, indexer_spec
from .norm import RmsNorm
from .ops import Ops
from .pages import MlaPages, PageKind, Pool
from .rope import rotate_halves, rotate_pairs, softmax_scale
from .weights import Dual, Linear, Stored, Weights

_EPSILON = 1e-6  # of the norms of both latents


@dataclass(frozen=True, eq=False)
class Absorbed:
    """The halves of ``kv_b_proj`` in the type of the model.

    Attributes:
        key: W_UK^T, ``[h, L, N]``, contiguous.
        value: W_UV, ``[h, V, L]``, contiguous.
    """

    key: Tensor
    value: Tensor

    @property
    def nbytes(self) -> int:
        return self.key.nbytes + self.value.nbytes


class LatentAttention:
    """See ``Attention``.

    Attributes:
        absorbed: derived weights; the same object in both phases where ``kv_b_proj`` is.
    """

    def __init__(self, text: Mapping[str, Any], weights: Weights, layer: int, ops: Ops) -> None:
        """
        Args:
            text: the language model's config.
            weights: below ``self_attn``.
            layer: its number.

        Raises:
            SourceError: a weight or number is missing, or they don't fit together.
        """
        self._ops, shape = ops, text_shape(text)
        if shape.mla is None:
            raise SourceError("kv_lora_rank is missing", where="config.json", accepted="a positive integer")
        self._sizes, self._heads = shape.mla, shape.heads
        self._load(weights)
        self._scale = softmax_scale(text, shape.mla.nope + shape.mla.rope)
        is_interleaved = bool(text.get("rope_interleave", True))
        self._rotate = rotate_pairs if is_interleaved else rotate_halves
        self.kinds: Sequence[PageKind] = (MlaPages(shape.mla.kv_lora_rank, shape.mla.rope, is_interleaved),)
        spec = indexer_spec(text)
        self._is_sparse, self._indexer = spec is not None, None
        if spec is not None and spec.type_of(layer) == "full":
            if shape.mla.q_lora_rank is None:
                raise SourceError(
                    "q_lora_rank is missing", where="config.json", accepted="a number, with an indexer"
                )
            self._indexer = Indexer(spec, shape.mla.rope, weights.below("indexer"), ops)
            self.kinds = (*self.kinds, self._indexer.kind)

    def _load(self, weights: Weights) -> None:
        ops, sizes, heads = self._ops, self._sizes, self._heads
        query = "q_proj" if sizes.q_lora_rank is None else "q_b_proj"
        self._query_down: Dual[Linear] | None = None
        if sizes.q_lora_rank is not None:
            self._query_down = weights.linear("q_a_proj")
            expect_rows(self._query_down, sizes.q_lora_rank, "self_attn.q_a_proj")
            self._query_norm = RmsNorm(weights.tensor("q_a_layernorm.weight"), _EPSILON, ops.dtype)
        self._query, self._latent = weights.linear(query), weights.linear("kv_a_proj_with_mqa")
        self._latent_norm = RmsNorm(weights.tensor("kv_a_layernorm.weight"), _EPSILON, ops.dtype)
        self._output, expand = weights.linear("o_proj"), weights.linear("kv_b_proj")
        expect_rows(self._query, heads * (sizes.nope + sizes.rope), f"self_attn.{query}")
        expect_rows(self._latent, sizes.kv_lora_rank + sizes.rope, "self_attn.kv_a_proj_with_mqa")
        expect_rows(expand, heads * (sizes.nope + sizes.value), "self_attn.kv_b_proj")
        prefill = absorbed(expand.prefill.weight, heads, sizes, ops)
        is_shared = expand.decode.weight is expand.prefill.weight
        decode = prefill if is_shared else absorbed(expand.decode.weight, heads, sizes, ops)
        self.absorbed = Dual(prefill, decode)

    @property
    def derived_bytes(self) -> int:
        return sum(part.nbytes for part in {self.absorbed.prefill, self.absorbed.decode})

    def forward(self, hidden: Tensor, step: StepContext, pools: Sequence[Pool]) -> Tensor:
        ops, sizes, phase = self._ops, self._sizes, step.phase
        query_latent = None
        if self._query_down is not None:
            query_latent = self._query_norm(ops.linear(hidden, self._query_down[phase]))
        query = ops.linear(hidden if query_latent is None else query_latent, self._query[phase])
        query = query.view(len(hidden), self._heads, sizes.nope + sizes.rope)
        down = ops.linear(hidden, self._latent[phase])
        latent, rope = down[:, : sizes.kv_lora_rank], down[:, sizes.kv_lora_rank :]
        if self._indexer is not None and query_latent is not None:
            step.topk = self._indexer.choose(hidden, query_latent, step, pools[1])
        weights = self.absorbed[phase]
        out = ops.mla(
            ops.per_head(query[..., : sizes.nope], weights.key),
            self._rotate(query[..., sizes.nope :], step.angles),
            self._latent_norm(latent),
            self._rotate(rope, step.angles),
            pools[0],
            step,
            self._scale,
            is_sparse=self._is_sparse,
        )
        return ops.linear(ops.per_head(out, weights.value).flatten(1), self._output[phase])


def absorbed(expand: Stored, heads: int, sizes: MlaShape, ops: Ops) -> Absorbed:
    """The halves of a ``kv_b_proj`` ``[h * (N + V), L]``, as ``Ops.per_head`` reads them: rows of inputs."""
    halves = ops.dense(expand).view(heads, sizes.nope + sizes.value, sizes.kv_lora_rank)
    return Absorbed(halves[:, : sizes.nope].transpose(1, 2).contiguous(), halves[:, sizes.nope :].contiguous())
