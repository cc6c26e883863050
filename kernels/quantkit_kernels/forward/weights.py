"""Weights as the operations of the forward pass take them: the artifact's tensors, neither copied nor reordered.

Their addresses are noted once, so a tensor must keep its memory (no ``set_``, no resized storage) for as long as a
weight holds it.

Legend: O outputs, I inputs, G groups in a row, E experts, (bo, bi) block of an FP8 scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import torch
from torch import Tensor

from quantkit_kernels.types import GROUP_SIZES

from . import check


@dataclass(frozen=True, eq=False)
class Int4Weight:
    """A linear in group INT4 (compressed-tensors ``pack-quantized``): W = (nibble - 8) * scale.

    Attributes:
        packed: int32 ``[O, I/8]``; column 8w+i is nibble i (low first) of word w. Rows contiguous.
        scale: bfloat16 ``[O, G]``.

    Raises:
        TypeError, ValueError: a tensor does not fit; the message names it.
    """

    packed: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        check.matrix("weight.packed", self.packed, torch.int32)
        check.matrix("weight.scale", self.scale, torch.bfloat16)
        check.same_device("weight.scale", self.scale, self.packed)
        rows, groups = self.scale.shape
        if self.packed.shape[0] != rows:
            raise ValueError(f"weight.packed has {self.packed.shape[0]} rows, weight.scale has {rows}")
        columns = self.packed.shape[1] * 8
        if groups == 0 or columns % groups or columns // groups not in GROUP_SIZES:
            raise ValueError(
                f"weight.scale of shape {list(self.scale.shape)} does not fit {columns} columns; "
                f"group sizes: {', '.join(map(str, GROUP_SIZES))}"
            )

    @cached_property
    def out_features(self) -> int:
        return self.packed.shape[0]

    @cached_property
    def in_features(self) -> int:
        return self.packed.shape[1] * 8

    @cached_property
    def group_size(self) -> int:
        return self.in_features // self.scale.shape[1]

    @cached_property
    def address(self) -> tuple[int, ...]:
        """What native code has to know: block rows and columns, address and row stride of packed and of scale."""
        return 1, self.group_size, *_address(self.packed), *_address(self.scale)


@dataclass(frozen=True, eq=False)
class Fp8Weight:
    """A linear in FP8 e4m3 with a scale per block: W = code * scale.

    Attributes:
        codes: float8_e4m3fn ``[O, I]``, rows contiguous.
        scale: float32 ``[ceil(O/bo), ceil(I/bi)]`` (``weight_scale_inv`` of DeepSeek-style checkpoints).
        block: (bo, bi); edge blocks may be partial. bi must be a multiple of 32, or at least I.

    Raises:
        TypeError, ValueError: a tensor does not fit; the message names it.
    """

    codes: Tensor
    scale: Tensor
    block: tuple[int, int] = (128, 128)

    def __post_init__(self) -> None:
        check.matrix("weight.codes", self.codes, torch.float8_e4m3fn)
        check.matrix("weight.scale", self.scale, torch.float32)
        check.same_device("weight.scale", self.scale, self.codes)
        if not isinstance(self.block, Sequence) or len(self.block) != 2:
            raise TypeError(f"weight.block must be two integers (rows, columns), got {self.block!r}")
        rows, columns = (check.integer("weight.block", size) for size in self.block)
        if columns % 32 and columns < self.in_features:
            raise ValueError(f"weight.block must be rows and columns, columns in steps of 32; got {self.block}")
        object.__setattr__(self, "block", (rows, columns))
        need = [-(-self.out_features // rows), -(-self.in_features // columns)]
        if list(self.scale.shape) != need:
            raise ValueError(f"weight.scale must be of shape {need}, got {list(self.scale.shape)}")

    @cached_property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @cached_property
    def in_features(self) -> int:
        return self.codes.shape[1]

    @cached_property
    def address(self) -> tuple[int, ...]:
        """What native code has to know: block rows and columns, address and row stride of codes and of scale."""
        return *self.block, *_address(self.codes), *_address(self.scale)


Weight = TypeVar("Weight", Int4Weight, Fp8Weight)


@dataclass(frozen=True, eq=False)
class Experts(Generic[Weight]):
    """The routed experts of one layer, each a SwiGLU: down(silu(gate(x)) * up(x)).

    Attributes:
        gate, up: E weights ``[I, H]``; H hidden size, I intermediate size.
        down: E weights ``[H, I]``.

    Raises:
        TypeError: no weights. ValueError: lengths, shapes, group sizes, blocks or devices differ.
    """

    gate: Sequence[Weight]
    up: Sequence[Weight]
    down: Sequence[Weight]

    def __post_init__(self) -> None:
        for name in ("gate", "up", "down"):  # a list might change after its addresses have been noted
            object.__setattr__(self, name, _weights(name, getattr(self, name)))
        if not len(self.gate) == len(self.up) == len(self.down) or not self.gate:
            counts = f"{len(self.gate)}, {len(self.up)} and {len(self.down)}"
            raise ValueError(f"experts must have as many gate as up and down weights, got {counts}")
        inner, hidden = self.intermediate_size, self.hidden_size
        for name, weights, shape in (
            ("gate", self.gate, (inner, hidden)),
            ("up", self.up, (inner, hidden)),
            ("down", self.down, (hidden, inner)),
        ):
            for e, weight in enumerate(weights):
                if (weight.out_features, weight.in_features) != shape:
                    found = [weight.out_features, weight.in_features]
                    raise ValueError(f"experts.{name}[{e}] must be of shape {list(shape)}, got {found}")
                if _kind(weight) != _kind(self.gate[0]):
                    raise ValueError(f"experts.{name}[{e}] has another format or device than experts.gate[0]")

    @cached_property
    def num_experts(self) -> int:
        return len(self.gate)

    @cached_property
    def intermediate_size(self) -> int:
        return self.gate[0].out_features

    @cached_property
    def hidden_size(self) -> int:
        return self.gate[0].in_features

    @cached_property
    def address(self) -> tuple[int, ...]:
        """What native code has to know: block rows and columns, addresses of ``pointers`` and ``strides``."""
        return *self.gate[0].address[:2], self.pointers.data_ptr(), self.strides.data_ptr()

    @cached_property
    def ranges(self) -> Tensor:
        """int64 ``[E * 6, 2]`` in host memory: first and one past the last address of every tensor."""
        parts = [part for e in zip(self.gate, self.up, self.down, strict=True) for w in e for part in _parts(w)]
        return torch.tensor([check.address_range(part) for part in parts], dtype=torch.int64)

    @cached_property
    def pointers(self) -> Tensor:
        """int64 ``[E, 6]`` on the weights' device: addresses of gate, its scale, up and its, down and its."""
        rows = [
            [part.data_ptr() for weight in expert for part in _parts(weight)]
            for expert in zip(self.gate, self.up, self.down, strict=True)
        ]
        return torch.tensor(rows, dtype=torch.int64, device=_parts(self.gate[0])[0].device)

    @cached_property
    def strides(self) -> Tensor:
        """int64 ``[E, 6]``: row strides in elements, in the order of ``pointers``."""
        rows = [
            [part.stride(0) for weight in expert for part in _parts(weight)]
            for expert in zip(self.gate, self.up, self.down, strict=True)
        ]
        return torch.tensor(rows, dtype=torch.int64, device=_parts(self.gate[0])[0].device)


def _weights(name: str, given: Sequence[Weight]) -> tuple[Weight, ...]:
    for weight in given:
        if not isinstance(weight, (Int4Weight, Fp8Weight)):
            raise TypeError(f"experts.{name} must hold Int4Weight or Fp8Weight, got {type(weight).__name__}")
    return tuple(given)


def _address(value: Tensor) -> tuple[int, int]:
    return value.data_ptr(), value.stride(0)


def _parts(weight: Int4Weight | Fp8Weight) -> tuple[Tensor, Tensor]:
    return (weight.packed if isinstance(weight, Int4Weight) else weight.codes), weight.scale


def _kind(weight: Int4Weight | Fp8Weight) -> tuple[object, ...]:
    device = weight.scale.device
    return (device, weight.group_size) if isinstance(weight, Int4Weight) else (device, weight.block)
