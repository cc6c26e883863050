"""Rotary position embeddings: frequencies from a config, and the two orders in which columns are paired.

Legend: T tokens, H heads, D rotary columns, D/2 pairs of them.

Half-split pairs column i with i + D/2 (GQA families, DeepSeek-V3.2's indexer); interleaved pairs 2i with 2i + 1
(MLA, GLM's indexer). ``rotate_pairs`` gives its result half-split, as transformers does: queries and keys are
permuted alike, so no score changes, but pages hold the keys in that order.

Frequencies are those of transformers 5.17 in float32: ``default``, ``linear`` and ``yarn`` (Peng et al. 2023,
arXiv:2309.00071, with DeepSeek's mscale). Sines are taken of float32 angles and applied in float32, so a bfloat16
column is rounded once (transformers rounds sines and products as well). Left out: types whose frequencies depend
on the length of the text (dynamic, longrope), because stored keys would have to change with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantkit.errors import SourceError, UnsupportedError
from quantkit_kernels.forward.rows import rotate
from quantkit_kernels.forward.twin import rows as reference

TYPES = ("default", "linear", "yarn")
_BLOCK = 256  # positions


class Angles(NamedTuple):
    """Cosines and sines of the positions of a step, float32 ``[T, D/2]`` each, times the attention factor."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, eq=False)
class Rope:
    """A model's frequencies.

    Attributes:
        frequencies: float32 ``[D/2]``, radians per position.
        factor: of cosines and sines (yarn's attention factor).
    """

    frequencies: Tensor
    factor: float = 1.0
    _table: list[Tensor] = field(default_factory=list, init=False, repr=False)  # one: float32 [2, positions, D/2]
    _filled: set[int] = field(default_factory=set, init=False, repr=False)  # blocks of it; the others are not yet
    _lock: Lock = field(default_factory=Lock, init=False, repr=False)  # steps of two threads may meet here

    @property
    def dim(self) -> int:
        """D."""
        return 2 * len(self.frequencies)

    def angles(self, positions: Tensor) -> Angles:
        """Of int64 ``[T]`` positions; once per step, all layers share them."""
        if not positions.numel():
            return Angles(*torch.empty(2, 0, len(self.frequencies)))
        needed = set(torch.unique(positions // _BLOCK).tolist())
        if not needed <= self._filled:
            with self._lock:
                self._fill(needed)
        cos, sin = self._table[0][:, positions]
        return Angles(cos, sin)

    def _fill(self, blocks: set[int]) -> None:
        known = self._table[0].shape[1] if self._table else 0
        longest = (max(blocks) + 1) * _BLOCK
        if known < longest:  # memory that is never written costs nothing
            table = torch.empty(2, max(longest, 2 * known), len(self.frequencies))
            for number in self._filled:
                rows = slice(number * _BLOCK, (number + 1) * _BLOCK)
                table[:, rows] = self._table[0][:, rows]
            self._table[:] = [table]
        for number in blocks - self._filled:
            start = number * _BLOCK
            self._table[0][:, start : start + _BLOCK] = self._block(start)
            self._filled.add(number)

    def _block(self, start: int) -> Tensor:
        """``[2, _BLOCK, D/2]``, always computed in this shape: torch's vectors and the rest behind the last whole
        one differ in the last bit, and a position's angles must not depend on the step."""
        angle = torch.arange(start, start + _BLOCK).float()[:, None] * self.frequencies
        return torch.stack([angle.cos(), angle.sin()]) * self.factor


def rotate_halves(x: Tensor, angles: Angles) -> Tensor:
    """``[T, ..., d]`` with its first D columns rotated, column i with i + D/2; the others pass."""
    return _rotated(x, angles, is_interleaved=False)


def rotate_pairs(x: Tensor, angles: Angles) -> Tensor:
    """``[T, ..., d]`` with its first D columns rotated, 2i with 2i + 1, and left half-split; the others pass."""
    return _rotated(x, angles, is_interleaved=True)


def _rotated(x: Tensor, angles: Angles, *, is_interleaved: bool) -> Tensor:
    by_head = x if x.dim() == 3 else x.reshape(len(x), -1, x.shape[-1])
    if x.dtype is torch.bfloat16:
        return rotate(by_head, angles.cos, angles.sin, is_interleaved=is_interleaved).view(x.shape)
    out = torch.empty_like(by_head, memory_format=torch.contiguous_format)
    reference.rotate(by_head, angles.cos, angles.sin, is_interleaved, out)
    return out.view(x.shape)


def rope_of(text: Mapping[str, Any], head_dim: int, *, partial: float = 1.0) -> Rope:
    """The rotary embedding of a language model's config.

    Args:
        text: the config, or its ``text_config``.
        head_dim: columns of a head (MLA: ``qk_rope_head_dim``).
        partial: share of them that is rotated where the config doesn't say (0.5 for GLM-4.x). ``rotary_dim``
            (MiniMax-M2) counts too, which transformers 5.17 overlooks.

    Raises:
        UnsupportedError: another type of rotary embedding.
        SourceError: a number is missing or makes no sense.
    """
    given = rope_parameters(text)
    dim = int(head_dim * _share(text, given, head_dim, partial))
    if dim < 2 or dim % 2:
        raise SourceError(
            f"{dim} of {head_dim} columns are rotary", where="config.json", accepted="an even number, 2 or more"
        )
    base = _number(given, "rope_theta")
    powers = base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if given["rope_type"] == "default":
        return Rope(1.0 / powers)
    factor = _number(given, "factor")
    if given["rope_type"] == "linear":
        return Rope(1.0 / powers / factor)
    return Rope(_yarn(given, powers, base, factor), _attention_factor(given, factor))


def rope_parameters(text: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary part of a config under the names of transformers 5, whichever version wrote it.

    Raises:
        UnsupportedError: another type of rotary embedding, or one that differs between layers.
    """
    found = text.get("rope_scaling") or text.get("rope_parameters") or {}
    given = dict(found) if isinstance(found, Mapping) else {"rope_type": found}
    given.setdefault("rope_type", given.get("type", "default"))
    if given["rope_type"] not in TYPES or any(isinstance(value, Mapping) for value in given.values()):
        raise UnsupportedError(
            f"rotary embeddings of type {given['rope_type']!r}", where="config.json: rope_parameters",
            accepted=", ".join(TYPES) + ", the same in all layers",
        )  # fmt: skip
    for name in ("rope_theta", "partial_rotary_factor"):
        if text.get(name) is not None:
            given.setdefault(name, text[name])
    given.setdefault("original_max_position_embeddings", text.get("max_position_embeddings"))
    return given


def softmax_scale(text: Mapping[str, Any], width: int) -> float:
    """Factor of the scores of MLA: ``width ** -0.5``, with yarn times the square of mscale.

    Args:
        width: columns of a query head, rotary ones included.
    """
    given = rope_parameters(text)
    scale: float = width**-0.5
    every = given.get("mscale_all_dim")
    if given["rope_type"] == "default" or not every:
        return scale
    mscale = _mscale(_number(given, "factor"), every)
    return scale * mscale * mscale


def _share(text: Mapping[str, Any], given: Mapping[str, Any], head_dim: int, partial: float) -> float:
    if "partial_rotary_factor" in given:
        return _number(given, "partial_rotary_factor")
    return _number(text, "rotary_dim") / head_dim if text.get("rotary_dim") else partial


def _yarn(given: Mapping[str, Any], powers: Tensor, base: float, factor: float) -> Tensor:
    """Slow columns are interpolated by ``factor``, fast ones left alone, a ramp between."""
    dim, length = 2 * len(powers), _number(given, "original_max_position_embeddings")

    def column(rotations: float) -> float:  # the one that turns so often over the original length
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = column(given.get("beta_fast") or 32), column(given.get("beta_slow") or 1)
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept


def _attention_factor(given: Mapping[str, Any], factor: float) -> float:
    if given.get("attention_factor") is not None:
        return _number(given, "attention_factor")
    mscale, every = given.get("mscale"), given.get("mscale_all_dim")
    return _mscale(factor, mscale) / _mscale(factor, every) if mscale and every else _mscale(factor)


def _mscale(scale: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(scale) + 1.0 if scale > 1 else 1.0


def _number(given: Mapping[str, Any], name: str) -> float:
    value: object = given.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise SourceError(
            f"{name} is {value!r}", where="config.json: rope_parameters", accepted="a positive number"
        )
    return value
