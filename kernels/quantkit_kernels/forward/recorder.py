"""Notes what a function computes, to compute it again on other numbers in the same memory (``tape.py``).

Calls of the native library are noted by ``cpu/call.py``; torch's operations by the dispatch mode that a recorder
is. So nothing that computes goes by unseen: what can't be repeated (a number read into Python decides what comes
next) makes the recording invalid, with a reason, and never a tape that leaves it out.

What has no input (zeros, ones, arange), or only such ones, is a constant and made once. ``Tensor.numpy()`` is
not seen: who reads numbers that way says so by ``refuse`` (``table.py`` does).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from ctypes import Array, Structure, c_int64
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_READING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_EMPTY = frozenset({"aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided"})
_OUT: Mapping[str, Callable[..., object]] = {  # a fifth of the time of finding and copying a new tensor
    "aten::add": torch.add,
    "aten::mul": torch.mul,
    "aten::div": torch.div,
    "aten::sigmoid": torch.sigmoid,
}


class Call(NamedTuple):
    """One call of a native function ``(level, address of call, threads)``."""

    function: Callable[..., int]
    level: int
    threads: int
    call: Array[c_int64] | Structure


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Inside it as a context, this thread's operations are noted as they run.

    Attributes:
        steps: native calls, and torch's operations as functions of no arguments.
        results: tensors that were made, which a tape must keep.
        refusal: why there can be no tape; None if there can.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Call | Callable[[], object]] = []
        self.results: list[Tensor] = []
        self.refusal: str | None = None
        self._constants: set[int] = set()  # addresses of their memory

    def __enter__(self) -> Recorder:
        _running.recorder = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        _running.recorder = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def note_call(self, call: Call) -> None:
        self.steps.append(call)

    def refuse(self, what: str) -> None:
        """``what`` was done, which can't be repeated."""
        self.refusal = self.refusal or what

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        schema = func._schema
        made = [r for r in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(r, Tensor)]
        given = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        given += [t for a in args if isinstance(a, (tuple, list)) for t in a if isinstance(t, Tensor)]
        known = {_memory(tensor) for tensor in given}
        self.results += [tensor for tensor in made if _memory(tensor) not in known]
        if schema.is_mutable:
            if any(_memory(tensor) in self._constants for tensor in made):
                self.refuse(f"{schema.name} of a constant")
            self.steps.append(lambda: func(*args, **kwargs))
        elif schema.name in _EMPTY:
            pass
        elif all(_memory(tensor) in self._constants for tensor in given):
            self._constants.update(map(_memory, made))
        elif not made or _READING & set(func.tags):
            self.refuse(schema.name)
        elif not {_memory(tensor) for tensor in made} <= known:
            self.steps.append(_again(func, args, kwargs, made))
        return result


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _again(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Tensor]) -> Callable[[], object]:
    """The operation once more, into the tensors that it made."""
    into = _OUT.get(func._schema.name)
    if into is not None and len(made) == 1:
        return lambda: into(*args, **kwargs, out=made[0])

    def run() -> None:
        found = func(*args, **kwargs)
        for old, new in zip(made, found if isinstance(found, (tuple, list)) else (found,), strict=True):
            old.copy_(new)

    return run


class _Running(threading.local):
    recorder: Recorder | None = None


_running = _Running()


def recorder() -> Recorder | None:
    """The one that notes this thread's operations now."""
    return _running.recorder
