"""Kinds of KV pages that a layer may need, and the memory of the pool: all layers' parts of a page lie together.

One page id stands for the same tokens in every layer, so a page of the pool is one run of bytes with a part per
layer (and per kind). It can be copied, summed up or handed to another process as one piece, and a pool of all
layers is one allocation, which may be shared memory.

Legend: N pages, S tokens in a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

_ALIGNMENT = 64  # of a part: a cache line


@dataclass(frozen=True)
class GqaPages:
    """Keys and values of ``num_kv_heads`` heads of ``head_dim``."""

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class MlaPages:
    """A latent of ``latent`` and a rotary key of ``rope`` columns, stored half-split.

    ``is_interleaved`` says which columns were pairs before; pages made otherwise are of another format.
    """

    latent: int
    rope: int
    is_interleaved: bool


@dataclass(frozen=True)
class IndexPages:
    """A key of ``head_dim`` columns of the DSA indexer, without a Hadamard rotation; pairs as in ``MlaPages``."""

    head_dim: int
    is_interleaved: bool


PageKind = GqaPages | MlaPages | IndexPages


class Layout(Protocol):
    """How one kind lies in memory; made by ``Ops.layout``."""

    @property
    def page_bytes(self) -> int: ...


class Pool(NamedTuple):
    """One kind of pages of one layer: uint8 ``[N, page_bytes]``, rows apart by the stride of the whole page."""

    pages: Tensor
    layout: Layout


def whole_page_bytes(layouts: Sequence[Sequence[Layout]]) -> int:
    """Of a page over all layers; ``layouts`` are those of each layer."""
    return sum(_aligned(layout.page_bytes) for layer in layouts for layout in layer)


def pools(layouts: Sequence[Sequence[Layout]], memory: Tensor) -> list[list[Pool]]:
    """The pools of each layer in ``memory``, uint8 ``[N, whole_page_bytes]``, without a copy.

    Raises:
        ValueError: memory of another type or size.
    """
    need = whole_page_bytes(layouts)
    if memory.dtype is not torch.uint8 or memory.dim() != 2 or memory.shape[1] != need:
        raise ValueError(f"memory must be uint8 of shape [N, {need}], got {memory.dtype} {list(memory.shape)}")
    start, found = 0, []
    for layer in layouts:
        own = []
        for layout in layer:
            own.append(Pool(memory[:, start : start + layout.page_bytes], layout))
            start += _aligned(layout.page_bytes)
        found.append(own)
    return found


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
