"""Decode steps of a decoder, recorded once per number of tokens and then repeated (``forward.tape``).

A decode step is hundreds of short operations; in Python each costs some microseconds, of a small model more than
the operations themselves. Steps of the same number of tokens have the same operations, so one that has come some
times (``recordings.py``) is recorded and the others repeat it: tokens, angles, slots and block table are written
to where the recorded operations read them. Slots and table are compared with the pool in every step all the same,
and then copied. The bits are those of a step that was not recorded.

What is kept is bounded. A recording holds its inputs and all intermediate results of a step; the ones used longest
ago make room. A step whose results alone are too large is not recorded, and they are let go as soon as that shows:
it is long enough for Python not to matter. Nor is a step that reads numbers back between operations (FP8
activations into experts), nor one that fails as it is recorded: it runs as ever then. Prefill steps differ in
shape every time.

Legend: T tokens of the step.
"""

from __future__ import annotations

import logging
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
from .recordings import Kind, Recordings
from .rope import Angles

MOST_BYTES_OF_ONE = 32 << 20  # inputs included
_SHORTEST = 256  # tokens that every recording has room for
_log = logging.getLogger(__name__)


class _Inputs(NamedTuple):
    """What a recording reads of the step."""

    token_ids: Tensor
    angles: Angles
    slots: CheckedSlots
    table: CheckedTable

    @property
    def nbytes(self) -> int:
        angles, table = self.angles, self.table
        own = self.token_ids, angles.cos, angles.sin, self.slots.slots
        return sum(t.nbytes for t in (*own, table.block_table, table.lengths, table.rows, table.limits))

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
        self._recordings: Recordings[_Recording] = Recordings()
        self._lock = Lock()

    @property
    def nbytes(self) -> int:
        """Memory of all recordings."""
        return self._recordings.nbytes

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
        kind = self._kind(token_ids, step, pools)
        found = self._recordings.find(kind)
        if found is not None:
            found.inputs.fill(token_ids, step, checked)
            found.tape.play()
            return found.tape.result.clone()
        if backend_for(token_ids) != "cpu" or not self._recordings.wants(kind):
            return self._decoder.forward(token_ids, step, pools)
        try:
            return self._record(kind, token_ids, step, checked, pools)
        except Exception as error:  # one of the step itself comes again below, which writes the same once more
            self._recordings.refuse(kind, repr(error))
            _log.warning("decode steps of %d tokens are not recorded: %r", kind.tokens, error)
            return self._decoder.forward(token_ids, step, pools)

    def _kind(self, token_ids: Tensor, step: StepContext, pools: Sequence[Sequence[Pool]]) -> Kind:
        reach = max(_SHORTEST, 1 << (step.longest - 1).bit_length())
        is_sparse = self._top_k is not None and step.longest > self._top_k
        return Kind(len(token_ids), reach, is_sparse, torch.get_num_threads(), pools[0][0].pages.data_ptr())

    def _record(
        self,
        kind: Kind,
        token_ids: Tensor,
        step: StepContext,
        checked: CheckedStep,
        pools: Sequence[Sequence[Pool]],
    ) -> Tensor:
        """The step, recorded."""
        entries = -(-kind.reach // checked.table.page_size)
        if entries * kind.tokens * 4 > MOST_BYTES_OF_ONE:  # the block table alone
            self._recordings.refuse(kind, "a block table too large", is_too_large=True)
            return self._decoder.forward(token_ids, step, pools)
        inputs = _Inputs(
            token_ids.clone(),
            Angles(step.angles.cos.clone(), step.angles.sin.clone()),
            checked.slots.hold(),
            checked.table.hold(entries),
        )
        own, used = _reading(inputs, step), inputs.nbytes
        result, tape = record(
            lambda: self._decoder.forward(inputs.token_ids, own, pools), MOST_BYTES_OF_ONE - used
        )
        if isinstance(tape, Tape):
            self._recordings.put(kind, _Recording(inputs, tape), tape.nbytes + used)
            return result.clone()
        self._recordings.refuse(kind, tape.reason, is_too_large=tape.is_too_large)
        return result


def _reading(inputs: _Inputs, step: StepContext) -> StepContext:
    """``step`` with its numbers where ``inputs`` has them."""
    table = inputs.table
    return StepContext(
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
