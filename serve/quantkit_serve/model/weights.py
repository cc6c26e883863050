"""Weights as the model's parts hold them: stored formats, a bias, one version per phase.

Where both views hold the same bytes, both phases hold the same object, so that identity of objects is identity of
memory. Left out: where tensors come from (``loader``).

Legend: O outputs, I inputs, E experts, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from quantkit_kernels.forward.weights import Experts, Fp8Weight, Int4Weight

from ..phase import Phase

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class PlainWeight:
    """An unquantized linear: bfloat16, float16 or float32 ``[O, I]``."""

    values: Tensor

    @property
    def out_features(self) -> int:
        return self.values.shape[0]

    @property
    def in_features(self) -> int:
        return self.values.shape[1]


Stored = PlainWeight | Int4Weight | Fp8Weight


@dataclass(frozen=True, eq=False)
class Linear:
    """``x W^T + bias``.

    Attributes:
        weight: ``[O, I]`` in any stored format.
        bias: plain ``[O]``, or None.
    """

    weight: Stored
    bias: Tensor | None = None


@dataclass(frozen=True)
class Dual(Generic[T]):
    """One thing in two versions; ``dual[phase]`` picks. Where they are equal both are the same object."""

    prefill: T
    decode: T

    def __getitem__(self, phase: Phase) -> T:
        return self.prefill if phase is Phase.PREFILL else self.decode


@dataclass(frozen=True, eq=False)
class ExpertSet:
    """The routed experts of a layer, each a SwiGLU, in one weight set.

    Attributes:
        gate, up: E weights ``[I, H]``.
        down: E weights ``[H, I]``.
    """

    gate: Sequence[Stored]
    up: Sequence[Stored]
    down: Sequence[Stored]

    @cached_property
    def fused(self) -> Experts[Int4Weight] | Experts[Fp8Weight] | None:
        """As the kernels take them in one call; None where they are not all of one quantized format."""
        parts = (self.gate, self.up, self.down)
        int4 = [[w for w in part if isinstance(w, Int4Weight)] for part in parts]
        fp8 = [[w for w in part if isinstance(w, Fp8Weight)] for part in parts]
        count = sum(len(part) for part in parts)
        if sum(map(len, int4)) == count and len({w.group_size for part in int4 for w in part}) == 1:
            return Experts(*int4)
        if sum(map(len, fp8)) == count and len({w.block for part in fp8 for w in part}) == 1:
            return Experts(*fp8)
        return None


class Weights(Protocol):
    """The weights below one module of the model, by the names of the checkpoint.

    ``weights.below("self_attn").linear("q_proj")`` is the linear ``...self_attn.q_proj``.
    """

    def linear(self, name: str) -> Dual[Linear]:
        """A linear with its bias, where it has one.

        Raises:
            SourceError: it is missing.
        """

    def tensor(self, name: str) -> Tensor:
        """A plain tensor that both phases share, for example ``q_norm.weight``, as stored.

        Raises:
            SourceError: it is missing.
        """

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""

    def below(self, name: str) -> Weights: ...
