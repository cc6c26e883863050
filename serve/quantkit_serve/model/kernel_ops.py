"""The model's operations in bfloat16, by ``quantkit_kernels.forward``; pages in FP8 or BF16.

The page formats of latent attention are made for the published sizes (512 latent, 64 rotary, 128 index columns).
Of a smaller model (the bundled one) pages have the same sizes and hold less. Its latent is padded with zeros,
which add nothing to any sum, up to whole blocks of 128, rotary columns up to 16, index keys to 128.

Legend: see ``ops``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.errors import UnsupportedError
from quantkit_kernels.forward import cache, gqa, index, mla
from quantkit_kernels.forward.checked import checked_decode, checked_prefill, checked_slots
from quantkit_kernels.forward.checked_table import ChosenPositions
from quantkit_kernels.forward.experts import moe_fp8, moe_int4
from quantkit_kernels.forward.linear import fp8_linear, int4_linear
from quantkit_kernels.forward.pages import INDEX_DIM, LATENT, LATENT_BLOCK, ROPE, GqaLayout, IndexLayout, MlaLayout
from quantkit_kernels.forward.plain import plain_linear, plain_linears
from quantkit_kernels.forward.recorder import refuse
from quantkit_kernels.forward.route import route
from quantkit_kernels.forward.rows import add
from quantkit_kernels.forward.twin.elementwise import silu
from quantkit_kernels.forward.twin.linear import dequantize
from quantkit_kernels.forward.weights import Fp8Weight, Int4Weight

from ..config import CacheConfig, ModelConfig
from ..phase import Phase
from .attention import CheckedStep, StepContext
from .pages import GqaPages, Layout, MlaPages, PageKind, Pool
from .spec import RouterSpec
from .weights import ExpertSet, Linear, PlainWeight, Stored

_E4M3_MAX = 448.0
_ROWS = 16  # of a product in float32
_INPUT_BLOCK = 128  # values of an FP8 linear's input that share a scale


class KernelOps:
    """See ``Ops``."""

    dtype = torch.bfloat16

    def __init__(self, model: ModelConfig, cache_config: CacheConfig) -> None:
        self._page_size = cache_config.page_size
        self._kv_dtype = cache_config.kv_dtype
        self._is_fresh = model.prefill_kv == "fresh"
        self._rounds_inputs = model.fp8_activations == "dynamic128"

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        weight = linear.weight
        if isinstance(weight, Int4Weight):
            y = int4_linear(x, weight)
        elif isinstance(weight, Fp8Weight):
            y = fp8_linear(round_e4m3(x) if self._rounds_inputs else x, weight)
        else:
            y = _plain(x, weight.values, self.dtype)
        return y if linear.bias is None else y + linear.bias.to(self.dtype)

    def float_linear(self, x: Tensor, weight: Stored) -> Tensor:
        if isinstance(weight, PlainWeight):
            return _plain(x, weight.values, torch.float32)
        return self.linear(x, Linear(weight)).float()

    def dense(self, weight: Stored) -> Tensor:
        if isinstance(weight, PlainWeight):
            return weight.values.to(self.dtype)
        return dequantize(weight, slice(None)).to(self.dtype)

    def per_head(self, x: Tensor, weight: Tensor) -> Tensor:
        return plain_linears(x, weight)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return add(a, b)

    def route(self, logits: Tensor, spec: RouterSpec, correction: Tensor | None) -> tuple[Tensor, Tensor]:
        return route(
            logits, spec.top_k, is_softmax=spec.kind == "softmax", correction=correction,
            num_groups=spec.num_groups, topk_groups=spec.topk_groups, normalizes=spec.normalizes,
            epsilon=spec.epsilon, scaling=spec.scaling,
        )  # fmt: skip

    def experts(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: ExpertSet) -> Tensor:
        fused = experts.fused
        if fused is None or (self._rounds_inputs and isinstance(fused.gate[0], Fp8Weight)):
            return self._one_by_one(x, topk_ids, topk_weights, experts)
        if isinstance(fused.gate[0], Int4Weight):
            return moe_int4(x, topk_ids, topk_weights, fused)  # type: ignore[arg-type]  # by its first weight
        return moe_fp8(x, topk_ids, topk_weights, fused)  # type: ignore[arg-type]

    def _one_by_one(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: ExpertSet) -> Tensor:
        """Experts of any formats, in ascending order, sums in float32 as the kernels'."""
        refuse("experts one by one")  # which the ids decide, and tolist is not seen
        total = torch.zeros(x.shape, dtype=torch.float32)
        for expert in sorted(set(topk_ids.flatten().tolist())):
            tokens, places = torch.where(topk_ids == expert)
            own = x[tokens]
            gate = self.linear(own, Linear(experts.gate[expert])).float()
            up = self.linear(own, Linear(experts.up[expert])).float()
            inner = (silu(gate) * up).to(self.dtype)
            down = self.linear(inner, Linear(experts.down[expert])).float()
            total.index_add_(0, tokens, down * topk_weights[tokens, places, None])
        return total.to(self.dtype)

    def layout(self, kind: PageKind) -> Layout:
        if isinstance(kind, GqaPages):
            return GqaLayout(self._page_size, kind.num_kv_heads, kind.head_dim, self._kv_dtype)
        if isinstance(kind, MlaPages):
            _expect("kv_lora_rank", kind.latent, LATENT)
            _expect("qk_rope_head_dim", kind.rope, ROPE)
            used = _up(kind.latent, LATENT_BLOCK), _up(kind.rope, 16)
            return MlaLayout(self._page_size, self._kv_dtype, *used)
        _expect("index_head_dim", kind.head_dim, INDEX_DIM)
        return IndexLayout(self._page_size, self._kv_dtype)

    def gqa(
        self, query: Tensor, key: Tensor, value: Tensor, pool: Pool, step: StepContext, scale: float
    ) -> Tensor:
        pages, layout = pool
        assert isinstance(layout, GqaLayout)  # our invariant: ``layout`` made it
        checked = self.checked(step, pages)
        table = checked.table
        cache.store_gqa(pages, layout, checked.slots, key, value)
        if table.cu_queries is None:
            return gqa.gqa_decode(query, pages, layout, table, table.lengths, scale=scale)
        fresh = (key, value) if table.is_fresh else (None, None)
        return gqa.gqa_prefill(
            query, pages, layout, table, table.cu_queries, table.lengths,
            scale=scale, fresh_key=fresh[0], fresh_value=fresh[1],
        )  # fmt: skip

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
        pages, layout = pool
        assert isinstance(layout, MlaLayout)  # our invariant: ``layout`` made it
        columns, indices = query_latent.shape[-1], step.topk if is_sparse else None
        query_latent, query_rope = _padded(query_latent, layout.latent), _padded(query_rope, layout.rope)
        latent, rope = _padded(latent, layout.latent), _padded(rope, layout.rope)
        checked = self.checked(step, pages)
        table = checked.table
        cache.store_mla(pages, layout, checked.slots, latent, rope)
        if table.cu_queries is None:
            out = mla.mla_decode(
                query_latent, query_rope, pages, layout, table, table.lengths, scale=scale, indices=indices
            )
        else:
            fresh = (latent, rope) if table.is_fresh else (None, None)
            out = mla.mla_prefill(
                query_latent, query_rope, pages, layout, table, table.cu_queries, table.lengths,
                scale=scale, fresh_latent=fresh[0], fresh_rope=fresh[1], indices=indices,
            )  # fmt: skip
        return out[..., :columns]

    def store_index(self, key: Tensor, pool: Pool, step: StepContext) -> None:
        pages, layout = pool
        assert isinstance(layout, IndexLayout)  # our invariant: ``layout`` made it
        cache.store_index_keys(pages, layout, self.checked(step, pages).slots, _padded(key, INDEX_DIM))

    def index(self, query: Tensor, head_weights: Tensor, pool: Pool, step: StepContext, k: int) -> ChosenPositions:
        pages, layout = pool
        assert isinstance(layout, IndexLayout)  # our invariant: ``layout`` made it
        keys = self.checked(step, pages).keys
        scores = index.index_scores(
            _padded(query, INDEX_DIM), head_weights, pages, layout, keys, keys.rows, keys.visible
        )
        return index.index_topk(scores, keys, min(k, scores.shape[1]))

    def checked(self, step: StepContext, pages: Tensor) -> CheckedStep:
        """Once for all layers, whose pools have the same ``pages``."""
        if step.checked is None:
            size, count = self._page_size, len(pages)
            slots = checked_slots(step.slots, page_size=size, num_pages=count)
            if step.phase is Phase.DECODE:
                table = keys = checked_decode(*_by_token(step), page_size=size, num_pages=count)
            else:
                run = step.block_table, step.cu_tokens, step.lengths
                keys = checked_prefill(*run, page_size=size, num_pages=count)
                table = keys
                if self._is_fresh:
                    table = checked_prefill(*run, page_size=size, num_pages=count, is_fresh=True)
            step.checked = CheckedStep(slots, table, keys)
        return step.checked


def _plain(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """``x W^T`` of an unquantized weight.

    Weights in float32 or float16 (MiniMax-M2's router) are multiplied in blocks of a fixed number of rows: the
    shape of a product decides the order of its sums, and a row's bits must not depend on how many there are.
    """
    if weight.dtype is torch.bfloat16:
        return plain_linear(x, weight, dtype=dtype)
    rows, wide = x.reshape(-1, x.shape[-1]).float(), weight.float()
    blocks = torch.split(torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % _ROWS)), _ROWS)
    y = torch.cat([torch.nn.functional.linear(block, wide) for block in blocks])[: len(rows)]
    return y.view(*x.shape[:-1], -1).to(dtype)


def round_e4m3(x: Tensor) -> Tensor:
    """Values as an engine's FP8 linear sees them: e4m3 with a float32 scale per 128 values of a row.

    The product of code and scale is rounded to x's type, which the kernels take (2^-9 relative, 2^-4 of a step).
    """
    columns = x.shape[-1]
    blocks = _padded(x.float(), -(-columns // _INPUT_BLOCK) * _INPUT_BLOCK).view(*x.shape[:-1], -1, _INPUT_BLOCK)
    scale = blocks.abs().amax(-1, keepdim=True) / _E4M3_MAX
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    rounded: Tensor = (blocks / scale).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).float() * scale
    return rounded.flatten(-2)[..., :columns].to(x.dtype)


def _by_token(step: StepContext) -> tuple[Tensor, Tensor]:
    """Block table and lengths of a decode step in which every token is a request of its own.

    Kernels of decode and of prefill add up long contexts in different orders. So the phase alone decides which one
    computes a token: several tokens of a request in one step have the bits that they have one by one, and the last
    chunk of a prompt has those of the whole prompt, even if it is one token.
    """
    if step.is_single:
        return step.block_table, step.lengths
    return step.block_table[step.rows.long()], step.visible


def _expect(name: str, columns: int, limit: int) -> None:
    """
    Raises:
        UnsupportedError: more columns than a page of the kernels holds.
    """
    if columns > limit:
        raise UnsupportedError(
            f"{name} is {columns}", where="config.json", accepted=f"at most {limit}, with compute in bfloat16",
            hint="float32 compute takes any size: slow, for comparisons.",
        )  # fmt: skip


def _up(columns: int, step: int) -> int:
    """The next multiple."""
    return -(-columns // step) * step


def _padded(x: Tensor, columns: int) -> Tensor:
    """Zeros behind the last column, up to ``columns``."""
    missing = columns - x.shape[-1]
    return x if missing == 0 else torch.nn.functional.pad(x, (0, missing))
