"""Several processes that calibrate one model together: who runs what, and what each must be told.

Batches of samples go round the processes for everything but the experts, experts are divided among them. What
travels are finished values, never sums to be completed elsewhere: a float sum that depends on how work was divided
would change the bits. So each number is computed by one process from the same operands as in a process alone.

``Ranks`` is that process alone: it does all and tells nobody. ``processes.Processes`` is one of several.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

EXPERT_TOKENS = 512  # what an expert costs besides its tokens, in tokens


class Ranks:
    """A process alone.

    Attributes:
        rank: of this process; 0 reads and writes the target.
        size: number of processes.
    """

    rank, size = 0, 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def owner(self, batch: int) -> int:
        """The process of a batch: in turn, so that all are at work on what comes in order; 0 has the first."""
        return batch % self.size

    def owners(self, tokens: Sequence[int], first: Collection[int]) -> list[int]:
        """The process of each expert: in their order, to the one with the least work so far.

        Args:
            tokens: of each expert.
            first: experts for process 0, which cost it little.
        """
        work, owners = [0] * self.size, []
        for expert, count in enumerate(tokens):
            owner = 0 if expert in first else work.index(min(work))
            work[owner] += 0 if expert in first else count + EXPERT_TOKENS
            owners.append(owner)
        return owners

    def everywhere(self, rows: Tensor, owner: int) -> None:
        """Give everybody rows (in place) that the owner has."""

    def to_first(self, rows: Tensor, owner: int) -> None:
        """Give them to process 0."""

    def from_first(self, rows: Tensor, owner: int) -> None:
        """Give the owner rows that process 0 has."""

    def share(self, found: Tensor | None, tokens: Tensor, places: Tensor, owner: int, like: Tensor) -> Any:
        """The part of an expert's outputs that belongs to this process's tokens.

        Args:
            found: ``[n, H]``, at its owner.
            tokens: int64 ``[n]``, their rows.
            places: int64 ``[n]``, the processes of these rows.
            owner: the process that ran the expert.
            like: whose type and width the outputs have.

        Returns:
            Rows of this process, and the outputs for them.
        """
        return tokens, found

    def tell(self, value: Any) -> Any:
        """What process 0 says, at everybody."""
        return value

    def deliver(self, value: Any, owner: int) -> Any:
        """What the owner says, at process 0; None elsewhere."""
        return value

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Stop unless everybody states the same.

        Raises:
            UsageError: naming what differs.
        """

    def call(self) -> None:
        """Process 0: the others are needed now."""

    def called(self) -> bool:
        """Other processes: wait for process 0; whether they are needed, or all is over."""
        return False


ALONE = Ranks()
