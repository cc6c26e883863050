"""A function's operations, recorded once and then repeated without the Python between them.

A decode step of a model has the same operations on the same shapes as the one before; only numbers differ: tokens,
positions, pages. Recorded on tensors that stay where they are, a step is repeated by writing new numbers into them
and making the same calls, runs of native ones in one (csrc/replay.cpp). Nothing is skipped that reads those
numbers: whoever fills the tensors checks them, as for any other step. For host memory and the native library.

    result, tape = record(function)  # runs it
    if isinstance(tape, Tape):
        tape.play()  # the result is in the same tensors

A tape keeps all tensors that were made, so its memory is that of all intermediate results (``nbytes``), and those
that native calls were given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import Array, Structure, addressof, c_int64, c_void_p, cast
from itertools import groupby
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from . import choice
from .recorder import Call, Recorder

Result = TypeVar("Result")


class Refused(NamedTuple):
    """A function that ran and can't be repeated.

    Attributes:
        reason: the operation.
        is_too_large: its intermediate results are.
    """

    reason: str
    is_too_large: bool = False


class _Step(Structure):
    """RecordedCall of csrc/replay.cpp."""

    _fields_ = (("function", c_void_p), ("call", c_void_p))


class _Replay(Structure):
    """QkReplay."""

    _fields_ = (("calls", c_void_p), ("count", c_int64), ("failed", c_int64))


class Tape(Generic[Result]):
    """See the module; ``record`` makes it.

    Attributes:
        result: what the recorded function returned; ``play`` writes it anew.
        nbytes: of the tensors that it made and keeps.
    """

    def __init__(self, result: Result, recorder: Recorder) -> None:
        self.result = result
        self._kept: Sequence[Tensor] = list(recorder.results.values())
        self.nbytes = recorder.nbytes
        self._parts: list[Callable[[], object]] = []
        for is_call, steps in groupby(recorder.steps, lambda step: isinstance(step, Call)):
            if is_call:
                self._parts.append(_together([step for step in steps if isinstance(step, Call)]))
            else:
                self._parts += [step for step in steps if not isinstance(step, Call)]

    def play(self) -> None:
        """Once more, on what is in the tensors now.

        Raises:
            MemoryError, RuntimeError: of a native function, see ``cpu/call.py``.
        """
        with torch.inference_mode():
            for part in self._parts:
                part()


def record(function: Callable[[], Result], most_bytes: int | None = None) -> tuple[Result, Tape[Result] | Refused]:
    """Run ``function`` and record it; what it returned, and the tape.

    Args:
        most_bytes: of a tape. Beyond it there is none, and intermediate results are no longer kept.
    """
    recorder = Recorder(most_bytes)
    with torch.inference_mode(), recorder:
        result = function()
    if recorder.refusal is not None:
        return result, Refused(recorder.refusal, recorder.is_too_large)
    return result, Tape(result, recorder)


def _together(calls: list[Call]) -> Callable[[], None]:
    """Calls in a row as one; all have the same level and number of threads."""
    from .cpu.call import entry, fail  # which notes its calls with a recorder

    steps: Array[_Step] = (_Step * len(calls))(
        *(_Step(cast(call.function, c_void_p), addressof(call.call)) for call in calls)  # type: ignore[arg-type]
    )
    replay = _Replay(addressof(steps), len(calls), 0)
    native, level, threads = entry(choice.library(), "qk_replay"), calls[0].level, calls[0].threads
    at = addressof(replay)

    def run() -> None:
        status = native(level, at, threads)
        if status:
            fail(getattr(calls[replay.failed].function, "__name__", "a native function"), status)

    run.kept = steps, replay, calls  # type: ignore[attr-defined]
    return run
