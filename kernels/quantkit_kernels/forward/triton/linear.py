"""Linears on the device; see kernels/linear.py for how, twin/linear.py for what.

Few tokens leave most of a GPU idle unless several programs share a row of the weight: the columns are split, into
a number of parts that depends on the weight alone. With many tokens one program adds the parts up in the same
order, so a row of y has the same bits either way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit_kernels.forward.weights import Fp8Weight, Int4Weight

from .kernels import linear as kernels
from .launch import ceil_div, launch

PROGRAMS = 512  # about four for each processor of a large GPU
SPLIT_COLUMNS = 1024  # at least, so that the sums of the parts cost little
FEW_TOKENS = 64  # up to here the parts go to programs of their own


@dataclass(frozen=True)
class Tile:
    """How many outputs and tokens a program makes, with how many warps and stages of loads in flight."""

    outputs: int
    tokens: int
    warps: int
    stages: int


def tile_for(tokens: int) -> Tile:
    if tokens <= 16:
        return Tile(64, 16, 4, 4)
    return Tile(64, 32, 4, 4) if tokens <= FEW_TOKENS else Tile(128, 64, 8, 3)


def splits_of(outputs: int, columns: int) -> int:
    """Parts of the columns, from the shape of the weight alone."""
    return max(1, min(PROGRAMS // ceil_div(outputs, 64), columns // SPLIT_COLUMNS))


def int4_linear(x: Tensor, weight: Int4Weight, out: Tensor) -> None:
    tokens, tile = x.shape[0], tile_for(x.shape[0])
    group, groups = weight.group_size, weight.scale.shape[1]
    rows, packed = evens_first(x, group), weight.packed.view(torch.uint8)
    splits = splits_of(weight.out_features, weight.in_features)
    per_step = 128 // group
    span = ceil_div(ceil_div(groups, splits), per_step) * per_step
    target, is_partial = _target(out, splits, tokens)
    grid = (
        ceil_div(weight.out_features, tile.outputs),
        ceil_div(tokens, tile.tokens),
        splits if is_partial else 1,
    )
    launch(
        kernels.int4_linear_kernel, grid, rows, rows.stride(0), packed, packed.stride(0), weight.scale,
        weight.scale.stride(0), target, tokens, weight.out_features, groups, span, splits, GROUP=group,
        PARTIAL=is_partial, BLOCK_N=tile.outputs, BLOCK_M=tile.tokens, warps=tile.warps, stages=tile.stages,
    )  # fmt: skip
    _finish(target, out, splits, is_partial)


def fp8_linear(x: Tensor, weight: Fp8Weight, out: Tensor) -> None:
    tokens, tile = x.shape[0], tile_for(x.shape[0])
    block_rows, block_columns = weight.block
    step = step_of(weight)
    splits = splits_of(weight.out_features, weight.in_features)
    span = ceil_div(ceil_div(weight.in_features, splits), step) * step
    target, is_partial = _target(out, splits, tokens)
    grid = (
        ceil_div(weight.out_features, tile.outputs),
        ceil_div(tokens, tile.tokens),
        splits if is_partial else 1,
    )
    codes = weight.codes.view(torch.uint8)
    launch(
        kernels.fp8_linear_kernel, grid, x, x.stride(0), codes, codes.stride(0), weight.scale,
        weight.scale.stride(0), target, tokens, weight.out_features, weight.in_features, span, splits, block_rows,
        block_columns, PARTIAL=is_partial, BLOCK_N=tile.outputs, BLOCK_M=tile.tokens, BLOCK_K=step,
        warps=tile.warps, stages=tile.stages,
    )  # fmt: skip
    _finish(target, out, splits, is_partial)


def step_of(weight: Fp8Weight) -> int:
    """Columns of a step: 128, 64 or 32, none under two scales."""
    columns = weight.block[1]
    if columns >= weight.in_features:
        return 128
    return next(step for step in (128, 64, 32) if columns % step == 0)


def evens_first(x: Tensor, group: int) -> Tensor:
    """x with, in every group, the even columns before the odd ones, as ``int4_group`` wants it."""
    return x.reshape(x.shape[0], -1, group // 2, 2).transpose(2, 3).reshape(x.shape[0], -1)


def _target(out: Tensor, splits: int, tokens: int) -> tuple[Tensor, bool]:
    """Where the kernel writes, and whether that is one part of each sum."""
    is_partial = splits > 1 and tokens <= FEW_TOKENS
    if not is_partial:
        return out, False
    return torch.empty((splits, *out.shape), dtype=torch.float32, device=out.device), True


def _finish(target: Tensor, out: Tensor, splits: int, is_partial: bool) -> None:
    if is_partial:
        grid = (ceil_div(out.numel(), 1024),)
        launch(kernels.sum_splits_kernel, grid, target, out, out.numel(), splits, BLOCK=1024)
