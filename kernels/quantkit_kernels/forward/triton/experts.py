"""Experts on the device; see kernels/experts.py for how, twin/experts.py for what.

The choices of a token are summed in the order in which it lists them, the twin's is by expert: both are float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from quantkit_kernels.forward.weights import Experts, Fp8Weight, Int4Weight

from .kernels import experts as kernels
from .launch import ceil_div, launch, power_of_2
from .linear import evens_first, step_of

MAX_TOKENS = 4096  # at a time: the shares of a pair are float32 [tokens * choices, hidden]
FEW_PAIRS = 16  # of an expert on average: up to here tiles of 16 pairs

_aligned: WeakKeyDictionary[Experts[Int4Weight] | Experts[Fp8Weight], bool] = WeakKeyDictionary()


@dataclass(frozen=True)
class _Routing:
    """Pairs by expert; int32 on the device."""

    starts: Tensor
    tile_expert: Tensor
    tile_first: Tensor
    order: Tensor
    block_pairs: int


def moe_int4(
    hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: Experts[Int4Weight], out: Tensor
) -> None:
    group = experts.gate[0].group_size
    for part in _parts(hidden):
        x, ids, weights = hidden[part], topk_ids[part].contiguous(), topk_weights[part].contiguous()
        routing = _route(ids, experts)
        size, tiles = routing.block_pairs, routing.tile_expert.shape[0]
        rows, aligned = evens_first(x, group), _is_aligned(experts)
        height, warps, stages = _tile(size)
        inner, width = experts.intermediate_size, experts.hidden_size
        h, shares = _workspaces(ids, x, inner, width)
        lists = (routing.starts, routing.tile_expert, routing.tile_first, routing.order)
        launch(  # two accumulators and a product each: half as many rows as down
            kernels.int4_gate_up_kernel, (tiles, ceil_div(inner, 64)), rows, rows.stride(0), experts.pointers,
            experts.strides, *lists, h, ids.shape[1], inner, width // group, GROUP=group, ALIGNED=aligned,
            BLOCK_N=64, BLOCK_M=size, warps=warps, stages=stages,
        )  # fmt: skip
        launch(
            kernels.int4_down_kernel, (tiles, ceil_div(width, height)), h, weights, experts.pointers,
            experts.strides, *lists, shares, inner, width, inner // group, GROUP=group, ALIGNED=aligned,
            BLOCK_N=height, BLOCK_M=size, warps=warps, stages=stages,
        )  # fmt: skip
        _combine(shares, ids, experts, out[part])


def moe_fp8(
    hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: Experts[Fp8Weight], out: Tensor
) -> None:
    block = experts.gate[0].block
    for part in _parts(hidden):
        x, ids, weights = hidden[part], topk_ids[part].contiguous(), topk_weights[part].contiguous()
        routing = _route(ids, experts)
        size, tiles = routing.block_pairs, routing.tile_expert.shape[0]
        height, warps, stages = _tile(size)
        inner, width = experts.intermediate_size, experts.hidden_size
        h, shares = _workspaces(ids, x, inner, width)
        lists = (routing.starts, routing.tile_expert, routing.tile_first, routing.order)
        launch(
            kernels.fp8_gate_up_kernel, (tiles, ceil_div(inner, height)), x, x.stride(0), experts.pointers,
            experts.strides, *lists, h, ids.shape[1], inner, width, *block, ALIGNED=_is_aligned(experts),
            BLOCK_N=height, BLOCK_M=size, BLOCK_K=step_of(experts.gate[0]), warps=warps, stages=stages,
        )  # fmt: skip
        launch(
            kernels.fp8_down_kernel, (tiles, ceil_div(width, height)), h, weights, experts.pointers,
            experts.strides, *lists, shares, inner, width, *block, ALIGNED=_is_aligned(experts), BLOCK_N=height,
            BLOCK_M=size, BLOCK_K=step_of(experts.down[0]), warps=warps, stages=stages,
        )  # fmt: skip
        _combine(shares, ids, experts, out[part])


def _tile(pairs: int) -> tuple[int, int, int]:
    """Rows of a weight, warps and stages of loads for a tile of so many pairs."""
    return (64, 4, 4) if pairs == 16 else (128, 8, 3)


def _parts(hidden: Tensor) -> list[slice]:
    return [slice(start, start + MAX_TOKENS) for start in range(0, hidden.shape[0], MAX_TOKENS)]


def _route(ids: Tensor, experts: Experts[Int4Weight] | Experts[Fp8Weight]) -> _Routing:
    pairs, count = ids.numel(), experts.num_experts
    size = 16 if pairs <= FEW_PAIRS * count else 64
    tiles = min(pairs, pairs // size + min(count, pairs))  # an upper bound, known without the ids

    def integers(n: int) -> Tensor:
        return torch.empty(n, dtype=torch.int32, device=ids.device)

    starts, tile_expert, tile_first, order = integers(count + 1), integers(tiles), integers(tiles), integers(pairs)
    block = min(1024, power_of_2(pairs, 32))
    launch(
        kernels.route_kernel, (1,), ids, starts, tile_expert, tile_first, pairs, count, tiles,
        EXPERTS=power_of_2(count, 32), BLOCK_M=size, BLOCK=block, warps=8,
    )  # fmt: skip
    launch(kernels.assign_kernel, (count,), ids, starts, order, pairs, BLOCK=block)
    return _Routing(starts, tile_expert, tile_first, order, size)


def _workspaces(ids: Tensor, x: Tensor, inner: int, width: int) -> tuple[Tensor, Tensor]:
    """bf16 ``[pairs, I]`` between gate_up and down, float32 ``[pairs, H]`` between down and combine."""
    pairs = ids.numel()
    return x.new_empty(pairs, inner), torch.empty((pairs, width), dtype=torch.float32, device=x.device)


def _combine(shares: Tensor, ids: Tensor, experts: Experts[Int4Weight] | Experts[Fp8Weight], out: Tensor) -> None:
    width = experts.hidden_size
    grid = (ids.shape[0], ceil_div(width, 1024))
    launch(kernels.combine_kernel, grid, shares, ids, out, ids.shape[1], experts.num_experts, width, BLOCK=1024)


def _is_aligned(experts: Experts[Int4Weight] | Experts[Fp8Weight]) -> bool:
    """Whether every row of every weight starts at 16 bytes: addresses from a table tell the compiler nothing."""
    if experts not in _aligned:
        stored = [
            w.packed if isinstance(w, Int4Weight) else w.codes
            for weights in (experts.gate, experts.up, experts.down)
            for w in weights
        ]
        _aligned[experts] = all(not t.data_ptr() % 16 and not t.stride(0) * t.element_size() % 16 for t in stored)
    return _aligned[experts]
