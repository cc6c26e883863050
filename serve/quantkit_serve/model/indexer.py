"""The indexer of DeepSeek Sparse Attention (DSA): which positions a token's attention reads.

Every token has one index key; a token's score of an earlier one is sum over heads of w * relu(q . k), and the
``index_topk`` best are kept (DeepSeek-V3.2; GLM-5.x is the same). GLM-5.2 runs an indexer on some layers only;
those between use the choice of the last one (``StepContext.topk``) and have no index keys.

Rotary columns come first in queries and keys, paired 2i with 2i + 1 for GLM and i with i + D/2 for DeepSeek-V3.2.
The reference implementation also turns both by a Hadamard matrix before it rounds them to FP8. That changes no
score but by rounding; transformers leaves it out, and so does this. Pages made with and without don't mix.

While no context is longer than ``index_topk`` every position is chosen: nothing is scored, only the key stored,
and attention is dense.

Legend: T tokens, H hidden size, Q columns of the query's latent, Hi indexer heads, D columns of one, K chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from quantkit.errors import SourceError
from quantkit_kernels.forward.checked_table import ChosenPositions

from ..phase import Phase
from .attention import StepContext
from .ops import Ops
from .pages import IndexPages, Pool
from .rope import Angles, rotate_halves, rotate_pairs
from .weights import Dual, Linear, Weights

IndexerType = Literal["full", "shared"]
Chosen = Tensor | ChosenPositions | None

_EPSILON = 1e-6  # of the keys' norm, in every implementation


@dataclass(frozen=True)
class IndexerSpec:
    """What config.json says of it.

    Attributes:
        heads, head_dim: Hi and D.
        top_k: positions that are kept.
        is_interleaved: rotary columns are paired 2i with 2i + 1.
        types: of each decoder layer; a layer behind them (multi-token prediction) runs its own.
    """

    heads: int
    head_dim: int
    top_k: int
    is_interleaved: bool
    types: tuple[IndexerType, ...]

    def type_of(self, layer: int) -> IndexerType:
        return self.types[layer] if layer < len(self.types) else "full"


def indexer_spec(text: Mapping[str, Any]) -> IndexerSpec | None:
    """Of a language model's config; None for a model without an indexer.

    Raises:
        SourceError: a number is missing, or a layer would share a choice that nobody made.
    """
    if text.get("index_topk") is None and text.get("index_head_dim") is None:
        return None
    heads, head_dim, top_k = (_count(text, name) for name in ("index_n_heads", "index_head_dim", "index_topk"))
    is_glm = text.get("model_type") == "glm_moe_dsa"
    is_interleaved = bool(text.get("indexer_rope_interleave", is_glm))
    return IndexerSpec(heads, head_dim, top_k, is_interleaved, _types(text, _count(text, "num_hidden_layers")))


class Indexer:
    """The indexer of one layer.

    Attributes:
        kind: of the pages of its keys.
    """

    def __init__(self, spec: IndexerSpec, rope: int, weights: Weights, ops: Ops) -> None:
        """
        Args:
            rope: rotary columns, the first of D.
            weights: below ``self_attn.indexer``.

        Raises:
            SourceError: a weight is missing, or not of the size that config.json says.
        """
        if rope > spec.head_dim:
            raise SourceError(
                f"qk_rope_head_dim is {rope}", where="config.json", accepted=f"at most {spec.head_dim}"
            )
        self.kind = IndexPages(spec.head_dim, spec.is_interleaved)
        self._spec, self._ops = spec, ops
        self._query, self._key = weights.linear("wq_b"), weights.linear("wk")
        self._head_weights = weights.linear("weights_proj")
        self._norm = weights.tensor("k_norm.weight").float(), weights.tensor("k_norm.bias").float()
        for name, linear, rows in (
            ("wq_b", self._query, spec.heads * spec.head_dim),
            ("wk", self._key, spec.head_dim),
            ("weights_proj", self._head_weights, spec.heads),
        ):
            expect_rows(linear, rows, f"self_attn.indexer.{name}")
        # Positive, so relu lets both through: that of the scores and that of the sum over heads.
        self._factor = spec.head_dim**-0.5 * spec.heads**-0.5

    def choose(self, hidden: Tensor, query_latent: Tensor, step: StepContext, pool: Pool) -> Chosen:
        """Stores the run's keys and chooses.

        Args:
            hidden: ``[T, H]``, normed: what attention gets.
            query_latent: ``[T, Q]``, the normed latent of its queries.

        Returns:
            int32 ``[T, K]``, positions ascending, then -1; K is ``index_topk``, or less if no context is longer.
            None in a decode step stands for all positions: dense attention then has the same bits (in prefill it
            adds up long contexts in another order).
        """
        ops, spec, phase = self._ops, self._spec, step.phase
        key = ops.linear(hidden, self._key[phase])
        key = torch.nn.functional.layer_norm(key, (spec.head_dim,), *self._norm, _EPSILON)
        ops.store_index(self._rotated(key, step.angles), pool, step)
        longest = step.longest
        if longest <= spec.top_k and phase is Phase.DECODE:
            return None
        if longest <= spec.top_k:
            position = torch.arange(longest, dtype=torch.int32, device=hidden.device)
            return position.where(position < step.visible[:, None], position.new_tensor(-1))
        query = ops.linear(query_latent, self._query[phase]).view(-1, spec.heads, spec.head_dim)
        weights = ops.float_linear(hidden, self._head_weights[phase].weight) * self._factor
        return ops.index(self._rotated(query, step.angles), weights, pool, step, spec.top_k)

    def _rotated(self, x: Tensor, angles: Angles) -> Tensor:
        return rotate_pairs(x, angles) if self._spec.is_interleaved else rotate_halves(x, angles)


def expect_rows(linear: Dual[Linear], rows: int, name: str) -> None:
    """
    Raises:
        SourceError: a weight has another number of outputs than config.json says.
    """
    for found in {linear.prefill.weight.out_features, linear.decode.weight.out_features}:
        if found != rows:
            raise SourceError(f"{found} rows", where=name, accepted=f"{rows}, by config.json")


def _types(text: Mapping[str, Any], layers: int) -> tuple[IndexerType, ...]:
    """``indexer_types``, or by the older keys of GLM-5.x, as transformers reads them; without any, all full."""
    found = text.get("indexer_types")
    if found is None:
        found = text.get("index_topk_pattern")
    if isinstance(found, str):
        found = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in found]
    if found is None:
        every, offset = max(int(text.get("index_topk_freq") or 1), 1), int(text.get("index_skip_topk_offset", 2))
        found = ["shared" if max(layer - offset + 1, 0) % every else "full" for layer in range(layers)]
    types: tuple[IndexerType, ...] = tuple(found)
    if len(types) < layers or set(types) - {"full", "shared"} or types[0] != "full":
        raise SourceError(
            f"indexer_types is {list(types)!r}", where="config.json",
            accepted=f"full or shared for each of {layers} layers, the first one full",
        )  # fmt: skip
    return types[:layers]


def _count(text: Mapping[str, Any], name: str) -> int:
    value = text.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SourceError(f"{name} is {value!r}", where="config.json", accepted="a positive integer")
    return value
