"""One step as the runner gets it: what the scheduler decided, in arrays, without tensors of torch.

Legend: R sequences of the step, T tokens of the step, P entries of a row of the block table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from .phase import Phase

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """A step: a run of tokens of each of R sequences, one after the other.

    A plain decode step has one token per sequence. Replay of generated tokens after a preemption, and the
    verification of speculated ones, are decode steps with several.

    Attributes:
        phase: picks the weight set.
        token_ids: int64 ``[T]``.
        positions: int64 ``[T]``, of each token in its sequence.
        cu_tokens: int32 ``[R+1]``, where each sequence's run starts; 0 first, T last.
        lengths: int32 ``[R]``, tokens of each context, the run included.
        block_table: int32 ``[R, P]``, pages of each sequence, room for the run included; the very array that the
            tag check compared.
        logit_rows: int64 ``[n]``, ascending, the tokens whose next-token logits are wanted.
    """

    phase: Phase
    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    cu_tokens: NDArray[np.int32]
    lengths: NDArray[np.int32]
    block_table: NDArray[np.int32]
    logit_rows: NDArray[np.int64]


@dataclass(frozen=True)
class ModelFacts:
    """What an engine must know of a model.

    Attributes:
        name: what /v1/models says.
        vocab_size: columns of the logits.
        max_model_len: positions that the model was trained for.
        page_bytes: of one page over all layers.
        kv_format_id: hash of everything that two parties must share to read each other's pages.
        eos_token_ids: tokens that end an answer.
        memory: bytes of the loaded weights by kind (``shared``, ``prefill``, ``decode``), and of weights that were
            made from stored ones (``derived``: the absorbed halves of MLA's kv_b_proj, in bfloat16).
    """

    name: str
    vocab_size: int
    max_model_len: int
    page_bytes: int
    kv_format_id: str
    eos_token_ids: frozenset[int]
    memory: dict[str, int]


class StepLost(Exception):
    """A step that will never be done, and whose computing has ended: nothing reads or writes its pages any more.

    Raised by a runner that can go on with other steps, now or later.
    """


class Runner(Protocol):
    """Computes steps; owns weights and the memory of the pages, nothing else."""

    facts: ModelFacts

    def allocate(self, num_pages: int) -> None:
        """Take the memory of the page pool, once, before the first step."""

    def run(self, batch: Batch) -> Tensor:
        """Store the run's keys and values in its pages; float32 logits ``[n, vocab]`` of ``logit_rows``.

        Raises:
            StepLost: the requests of this step end, all others go on. Anything else ends the engine.
        """


@runtime_checkable
class Proposer(Protocol):
    """A runner of a model that proposes tokens with a multi-token-prediction layer."""

    def propose(self, batch: Batch, rows: NDArray[np.int64], counts: NDArray[np.int64]) -> Sequence[Sequence[int]]:
        """Run the layer over tokens of the latest step, now that it is known what followed them.

        Stores the layer's own keys and values in the same pages. What a token leaves there depends on the one that
        follows it.

        Args:
            batch: of the decode phase. ``token_ids`` are the tokens that follow, everything else is of those that
                they follow: the beginnings of runs of the latest step, sequences without any left out.
                ``logit_rows``: p of them, each the last of its run, behind whose following token others are to be
                proposed.
            rows: int64 ``[T]``, which tokens of the latest step these are.
            counts: int64 ``[p]``, how many to propose, at least 1. The pages have room for ``counts - 1`` tokens
                behind the run, which are written.

        Returns:
            ``counts`` tokens for each of p.
        """
