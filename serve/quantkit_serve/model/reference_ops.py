"""The model's operations in float32, plain torch, on dequantized weights: what the kernels are compared with.

Slow and large on purpose: every weight is dequantized once and kept, attention loops over sequences. Pages hold
float32 or bfloat16 values, without scales. With ``deterministic`` every token is computed by itself, since the
shape of a product decides the order of its sums.

Legend: see ``ops``; N pages, S tokens in a page, C columns that a token has in a pool, n tokens of a context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit_kernels.forward.twin.elementwise import silu
from quantkit_kernels.forward.twin.index import index_topk
from quantkit_kernels.forward.twin.linear import dequantize
from quantkit_kernels.forward.twin.route import route

from ..config import CacheConfig, ModelConfig
from ..phase import Phase
from .attention import StepContext
from .pages import GqaPages, Layout, MlaPages, PageKind, Pool
from .spec import RouterSpec
from .weights import ExpertSet, Linear, PlainWeight, Stored


@dataclass(frozen=True)
class PlainLayout:
    """S tokens of C values."""

    page_size: int
    columns: int
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.columns * self.dtype.itemsize

    def views(self, pages: Tensor) -> Tensor:
        """``[N, S, C]``, sharing memory."""
        return pages.view(self.dtype).view(-1, self.page_size, self.columns)


class ReferenceOps:
    """See ``Ops``."""

    dtype = torch.float32

    def __init__(self, model: ModelConfig, cache: CacheConfig) -> None:
        self._page_size = cache.page_size
        self._kv_dtype = torch.float32 if cache.kv_dtype == "f32" else torch.bfloat16
        self._is_fresh = model.prefill_kv == "fresh"
        self._is_alone = model.deterministic
        self._dense: dict[Stored, Tensor] = {}

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        y = self.float_linear(x, linear.weight)
        return y if linear.bias is None else y + linear.bias.float()

    def float_linear(self, x: Tensor, weight: Stored) -> Tensor:
        dense = self.dense(weight)
        return self._by_token(lambda rows: rows @ dense.T, x)

    def dense(self, weight: Stored) -> Tensor:
        if weight not in self._dense:
            if isinstance(weight, PlainWeight):
                self._dense[weight] = weight.values.float()
            else:
                self._dense[weight] = dequantize(weight, slice(None))
        return self._dense[weight]

    def per_head(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._by_token(lambda rows: torch.einsum("thi,hoi->tho", rows, weight), x)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def route(self, logits: Tensor, spec: RouterSpec, correction: Tensor | None) -> tuple[Tensor, Tensor]:
        ids = torch.empty((len(logits), spec.top_k), dtype=torch.int64)
        weights = torch.empty(ids.shape)
        is_softmax, groups = spec.kind == "softmax", (spec.num_groups, spec.topk_groups)
        route(logits, is_softmax, correction, *groups, spec.normalizes, spec.epsilon, spec.scaling, ids, weights)
        return ids, weights

    def experts(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: ExpertSet) -> Tensor:
        total = torch.zeros_like(x)
        for expert in sorted(set(topk_ids.flatten().tolist())):
            tokens, places = torch.where(topk_ids == expert)
            gate = self.float_linear(x[tokens], experts.gate[expert])
            up = self.float_linear(x[tokens], experts.up[expert])
            down = self.float_linear(silu(gate) * up, experts.down[expert])
            total.index_add_(0, tokens, down * topk_weights[tokens, places, None])
        return total

    def layout(self, kind: PageKind) -> Layout:
        if isinstance(kind, GqaPages):
            columns = 2 * kind.num_kv_heads * kind.head_dim
        elif isinstance(kind, MlaPages):
            columns = kind.latent + kind.rope
        else:
            columns = kind.head_dim
        return PlainLayout(self._page_size, columns, self._kv_dtype)

    def gqa(
        self, query: Tensor, key: Tensor, value: Tensor, pool: Pool, step: StepContext, scale: float
    ) -> Tensor:
        heads, dim = key.shape[1:]
        out = torch.empty_like(query)
        for tokens, context in self._stored(torch.stack([key, value], 1).flatten(1), pool, step):
            k, v = context.view(-1, 2, heads, dim).repeat_interleave(query.shape[1] // heads, 2).unbind(1)
            out[tokens] = _attend(query[tokens], k, v, _causal(tokens, step, len(k)), scale)
        return out

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
        query = torch.cat([query_latent, query_rope], -1)
        out = torch.empty_like(query_latent)
        for tokens, context in self._stored(torch.cat([latent, rope], -1), pool, step):
            mask = _causal(tokens, step, len(context))
            if is_sparse and isinstance(step.topk, Tensor):
                chosen = torch.zeros(mask.shape[0], mask.shape[1] + 1, dtype=torch.bool)
                # -1 falls into the last column.
                chosen.scatter_(1, step.topk[tokens].long() % chosen.shape[1], True)
                mask = mask & chosen[:, :-1]
            key = context[:, None].expand(-1, query.shape[1], -1)
            out[tokens] = _attend(query[tokens], key, key[..., : latent.shape[1]], mask, scale)
        return out

    def store_index(self, key: Tensor, pool: Pool, step: StepContext) -> None:
        _store(key, pool, step)

    def index(self, query: Tensor, head_weights: Tensor, pool: Pool, step: StepContext, k: int) -> Tensor:
        longest = int(step.lengths.max())
        scores = torch.full((len(query), longest), -torch.inf)
        for tokens, keys in self._queries(_contexts(pool, step), step):
            heads = torch.relu(torch.einsum("thd,sd->ths", query[tokens], keys))
            scores[tokens, : len(keys)] = torch.einsum("th,ths->ts", head_weights[tokens], heads)
        return index_topk(scores, step.visible, min(k, longest))

    def _stored(self, own: Tensor, pool: Pool, step: StepContext) -> Iterator[tuple[slice, Tensor]]:
        """Stores the run's values ``[T, C]``; tokens that attend together, and their context ``[n, C]``."""
        _store(own, pool, step)
        return self._queries(self._fresh(own, _contexts(pool, step), step), step)

    def _fresh(
        self, own: Tensor, contexts: Iterator[tuple[slice, Tensor]], step: StepContext
    ) -> Iterator[tuple[slice, Tensor]]:
        for tokens, context in contexts:
            if self._is_fresh and step.phase is Phase.PREFILL:
                context[len(context) - (tokens.stop - tokens.start) :] = own[tokens]
            yield tokens, context

    def _queries(
        self, contexts: Iterator[tuple[slice, Tensor]], step: StepContext
    ) -> Iterator[tuple[slice, Tensor]]:
        """The tokens of a sequence together, or each by itself with what it sees."""
        for tokens, context in contexts:
            if not self._is_alone:
                yield tokens, context
                continue
            for token in range(tokens.start, tokens.stop):
                yield slice(token, token + 1), context[: int(step.visible[token])]

    def _by_token(self, product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return torch.cat([product(row) for row in torch.split(x, 1)]) if self._is_alone and len(x) else product(x)


def _store(own: Tensor, pool: Pool, step: StepContext) -> None:
    pages, layout = pool
    assert isinstance(layout, PlainLayout)  # our invariant: ``ReferenceOps.layout`` made it
    offsets = step.slots // layout.page_size, step.slots % layout.page_size
    layout.views(pages)[offsets] = own.to(layout.dtype)


def _contexts(pool: Pool, step: StepContext) -> Iterator[tuple[slice, Tensor]]:
    """Of each sequence its tokens and its context ``[n, C]``, as the pages hold it."""
    pages, layout = pool
    assert isinstance(layout, PlainLayout)  # our invariant: ``ReferenceOps.layout`` made it
    values, starts = layout.views(pages), step.cu_tokens.tolist()
    for row, length in enumerate(step.lengths.tolist()):
        used = step.block_table[row, : -(-length // layout.page_size)].long()
        yield slice(starts[row], starts[row + 1]), values[used].flatten(0, 1)[:length].float()


def _causal(tokens: slice, step: StepContext, length: int) -> Tensor:
    """bool ``[t, n]``: what each token of a sequence sees."""
    return torch.arange(length) < step.visible[tokens, None]


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """query ``[t, H, D]``, key ``[n, H, D]``, value ``[n, H, Dv]``, mask bool ``[t, n]``; ``[t, H, Dv]``."""
    scores = torch.einsum("thd,nhd->htn", query, key) * scale
    p = torch.softmax(scores.masked_fill(~mask, -torch.inf), -1)
    return torch.einsum("htn,nhd->thd", p, value)
