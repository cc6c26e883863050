"""What an attention of one layer is given and what it gives back.

Legend: T tokens of the step, R sequences, P entries of a row of the block table, S tokens in a page, H hidden
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from quantkit_kernels.forward.checked_table import CheckedSlots, CheckedTable, ChosenPositions

from ..phase import Phase
from .pages import PageKind, Pool
from .rope import Angles


@dataclass(frozen=True)
class CheckedStep:
    """Where a step reads and writes, compared with the pool once for all its layers (``KernelOps``).

    Attributes:
        slots: of its tokens.
        table: of attention.
        keys: of the indexer, which reads the run's own keys from the pages in any case.
    """

    slots: CheckedSlots
    table: CheckedTable
    keys: CheckedTable


@dataclass
class StepContext:
    """A ``Batch`` in tensors, and what layers hand on to later ones within the step.

    Attributes:
        phase: picks the weight set.
        positions: int64 ``[T]``.
        cu_tokens: int32 ``[R+1]``, where each sequence's run starts.
        lengths: int32 ``[R]``, tokens of each context, the run included.
        block_table: int32 ``[R, P]``.
        slots: int64 ``[T]``, page * S + offset of each token.
        rows: int32 ``[T]``, each token's row of the block table.
        visible: int32 ``[T]``, tokens that each token sees, itself included: positions + 1.
        is_single: every sequence has one token.
        angles: of the positions by the model's rotary embedding, for ``rope.rotate_halves`` and ``rotate_pairs``.
        longest: of ``lengths``.
        topk: int32 ``[T, K]``, positions ascending, then -1: what the latest layer with an indexer chose; layers
            that share it read it. None before, and where it chose all positions.
        checked: None before the first layer.
    """

    phase: Phase
    positions: Tensor
    cu_tokens: Tensor
    lengths: Tensor
    block_table: Tensor
    slots: Tensor
    rows: Tensor
    visible: Tensor
    is_single: bool
    angles: Angles
    longest: int
    topk: Tensor | ChosenPositions | None = None
    checked: CheckedStep | None = None


class Attention(Protocol):
    """The attention of one layer, its weights included."""

    @property
    def kinds(self) -> Sequence[PageKind]:
        """Of the page pools that it needs, in the order in which it is given them."""

    @property
    def derived_bytes(self) -> int:
        """Memory of weights that were made from the stored ones."""

    def forward(self, hidden: Tensor, step: StepContext, pools: Sequence[Pool]) -> Tensor:
        """From normed hidden states ``[T, H]`` to what is added to the residual, ``[T, H]``.

        Stores the run's keys and values in ``pools`` at ``step.slots``.
        """
