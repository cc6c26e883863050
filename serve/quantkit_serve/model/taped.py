"""Decode steps of a decoder, recorded once per number of tokens and then repeated (``forward.tape``).

A decode step is hundreds of short operations; in Python each costs some microseconds, of a small model more than
the operations themselves. Steps of the same number of tokens have the same operations, so the second one is
recorded and the others repeat it: tokens, angles, slots and block table are written to where the recorded
operations read them. Slots and table are compared with the pool in every step all the same, and then copied.
The bits are those of a step that was not recorded.

What is kept is bounded. A recording holds all intermediate results of a step; the ones used longest ago make room,
and a step whose results alone are too large is not recorded: it is long enough for Python not to matter. Nor is a
step that reads numbers back between operations (FP8 activations into experts). Prefill steps differ in shape every
time.

Legend: T tokens of the step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit_kernels.forward.checked_table import CheckedSlots, CheckedTable
from quantkit_kernels.forward.choice import backend_for
from quantkit_kernels.forward.tape import Tape, record

from .attention import CheckedStep, StepContext
from .decoder import Decoder
from .kernel_ops import KernelOps
from .pages import Pool
from .rope import Angles

MOST_BYTES = 128 << 20  # of all recordings
MOST_BYTES_OF_ONE = 32 << 20
_MOST_KINDS = 256  # of steps that are remembered
_SHORTEST = 256  # tokens that every recording has room for


class Kind(NamedTuple):
    """Steps that have the same operations on the same shapes.

    Attributes:
        tokens: T.
        reach: tokens of the longest context that there is room for: a power of two.
        is_sparse: some context is longer than what the indexer chooses.
        threads: torch's number of them.
    """

    tokens: int
    reach: int
    is_sparse: bool
    threads: int


class _Inputs(NamedTuple):
    """What a recording reads of the step."""

    token_ids: Tensor
    angles: Angles
    slots: CheckedSlots
    table: CheckedTable

    def fill(self, token_ids: Tensor, step: StepContext, checked: CheckedStep) -> None:
        self.token_ids.copy_(token_ids)
        self.angles.cos.copy_(step.angles.cos)
        self.angles.sin.copy_(step.angles.sin)
        self.slots.refill(checked.slots)
        self.table.refill(checked.table)


class _Recording(NamedTuple):
    inputs: _Inputs
    tape: Tape[Tensor]


class TapedDecoder:
    """``Decoder.forward`` for decode steps.

    Args:
        top_k: positions that the decoder's indexers choose; None without one.
    """

    def __init__(self, decoder: Decoder, ops: KernelOps, top_k: int | None) -> None:
        self._decoder, self._ops, self._top_k = decoder, ops, top_k
        # None: seen once, or not to be recorded (``_refused``)
        self._recordings: OrderedDict[Kind, _Recording | None] = OrderedDict()
        self._refused: set[Kind] = set()
        self._lock = Lock()

    @property
    def nbytes(self) -> int:
        """Memory of all recordings."""
        return sum(found.tape.nbytes for found in self._recordings.values() if found is not None)

    def forward(self, token_ids: Tensor, step: StepContext, pools: Sequence[Sequence[Pool]]) -> Tensor:
        """As the decoder's; the result is the caller's own.

        Args:
            step: of the decode phase, of pools in host memory.
        """
        if not self._lock.acquire(blocking=False):  # another thread's step is in the recordings
            return self._decoder.forward(token_ids, step, pools)
        try:
            return self._forward(token_ids, step, pools)
        finally:
            self._lock.release()

    def _forward(self, token_ids: Tensor, step: StepContext, pools: Sequence[Sequence[Pool]]) -> Tensor:
        checked = self._ops.checked(step, pools[0][0].pages)
        kind = self._kind(token_ids, step)
        is_new = kind not in self._recordings
        if is_new or kind in self._refused or backend_for(token_ids) != "cpu":
            self._recordings[kind] = None
            self._make_room()
            return self._decoder.forward(token_ids, step, pools)
        self._recordings.move_to_end(kind)
        found = self._recordings[kind]
        if found is None:
            return self._record(kind, token_ids, step, checked, pools).clone()
        found.inputs.fill(token_ids, step, checked)
        found.tape.play()
        return found.tape.result.clone()

    def _kind(self, token_ids: Tensor, step: StepContext) -> Kind:
        reach = max(_SHORTEST, 1 << (step.longest - 1).bit_length())
        is_sparse = self._top_k is not None and step.longest > self._top_k
        return Kind(len(token_ids), reach, is_sparse, torch.get_num_threads())

    def _record(
        self,
        kind: Kind,
        token_ids: Tensor,
        step: StepContext,
        checked: CheckedStep,
        pools: Sequence[Sequence[Pool]],
    ) -> Tensor:
        """The step, recorded; its result lies in the recording."""
        inputs = _Inputs(
            token_ids.clone(),
            Angles(step.angles.cos.clone(), step.angles.sin.clone()),
            checked.slots.hold(),
            checked.table.hold(-(-kind.reach // checked.table.page_size)),
        )
        table = inputs.table
        own = StepContext(
            phase=step.phase,
            positions=step.positions,
            cu_tokens=step.cu_tokens,
            lengths=table.lengths,
            block_table=table.block_table,
            slots=inputs.slots.slots,
            rows=table.rows,
            visible=table.visible,
            is_single=True,
            angles=inputs.angles,
            longest=step.longest,
            checked=CheckedStep(inputs.slots, table, table),
        )
        result, tape = record(lambda: self._decoder.forward(inputs.token_ids, own, pools))
        if isinstance(tape, Tape) and tape.nbytes <= MOST_BYTES_OF_ONE:
            self._recordings[kind] = _Recording(inputs, tape)
            self._make_room()
        else:
            self._refused.add(kind)
        return result

    def _make_room(self) -> None:
        while len(self._recordings) > _MOST_KINDS or (len(self._recordings) > 1 and self.nbytes > MOST_BYTES):
            kind, _ = self._recordings.popitem(last=False)
            self._refused.discard(kind)
