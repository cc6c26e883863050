"""Rotary position embedding: frequencies, tables of cosines and sines, and the half-split rotation.

Tables are float32 and rounded to the type of the hidden states, as transformers does. Yarn (Peng et al. 2023):
frequencies between two bounds are blended from unscaled to divided by ``factor``; cosines and sines get the factor
``attention_factor``.

Legend: T tokens, d rotary columns, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .spec import RopeSpec


class Rotary:
    """Cosines and sines of positions; the table grows with the longest context seen."""

    def __init__(self, spec: RopeSpec, dtype: torch.dtype) -> None:
        self._frequencies, self._factor = frequencies(spec)
        self._dtype = dtype
        self._table = self._rows(0, 64)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """``cos, sin`` of int64 ``[T]``, each ``[T, d]``, both halves of the columns alike."""
        longest = int(positions.max()) + 1 if positions.numel() else 0
        if longest > self._table.shape[1]:
            more = max(longest, 2 * self._table.shape[1])
            self._table = torch.cat([self._table, self._rows(self._table.shape[1], more)], 1)
        return self._table[0, positions], self._table[1, positions]

    def _rows(self, start: int, stop: int) -> Tensor:
        """``[2, stop - start, d]``."""
        angles = torch.arange(start, stop).float()[:, None] * self._frequencies
        angles = torch.cat([angles, angles], -1)
        return (torch.stack([angles.cos(), angles.sin()]) * self._factor).to(self._dtype)


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first d columns of every head, pairs (i, i + d/2).

    Args:
        x: ``[T, H, D]``.
        cos, sin: ``[T, d]``.
    """
    dim = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    own = x[..., :dim]
    turned = torch.cat([-own[..., dim // 2 :], own[..., : dim // 2]], -1)
    own = own * cos + turned * sin
    return own if dim == x.shape[-1] else torch.cat([own, x[..., dim:]], -1)


def frequencies(spec: RopeSpec) -> tuple[Tensor, float]:
    """Float32 ``[d/2]`` and the factor of cosines and sines."""
    powers = spec.theta ** (torch.arange(0, spec.dim, 2, dtype=torch.float) / spec.dim)
    if spec.kind == "default":
        return 1.0 / powers, 1.0
    scaling = spec.scaling
    original = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or spec.max_positions / original
    low, high = _correction_range(scaling, spec, original)
    ramp = ((torch.arange(spec.dim // 2, dtype=torch.float) - low) / (high - low)).clamp(0, 1)
    extrapolates = 1 - ramp
    blended = 1.0 / (factor * powers) * (1 - extrapolates) + 1.0 / powers * extrapolates
    return blended, _attention_factor(scaling, factor)


def mscale(factor: float, weight: float = 1.0) -> float:
    """Yarn's temperature: 0.1 * weight * ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    stated = scaling.get("attention_factor")
    if stated is not None:
        return float(stated)
    own, every = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return mscale(factor, own) / mscale(factor, every) if own and every else mscale(factor)


def _correction_range(scaling: Mapping[str, Any], spec: RopeSpec, original: float) -> tuple[float, float]:
    """The columns between which frequencies go over from unscaled to scaled."""

    def column(rotations: float) -> float:
        return spec.dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = column(scaling.get("beta_fast") or 32), column(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    return low, high + 0.001 if low == high else high
