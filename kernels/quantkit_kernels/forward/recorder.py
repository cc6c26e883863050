"""Notes what a function computes, to compute it again on other numbers in the same memory (``tape.py``).

Calls of the native library are noted by ``cpu/call.py``; torch's operations by the dispatch mode that a recorder
is. So nothing that computes goes by unseen: what can't be repeated (a number read into Python decides what comes
next) makes the recording invalid, with a reason, and never a tape that leaves it out.

What has no input (zeros, ones, arange), or only such ones, is a constant and made once. ``Tensor.numpy()`` and
``Tensor.tolist()`` are not seen: who reads numbers that way says so by ``refuse`` (``table.py`` does).

An operation that torch composes of others is taken apart before it is noted. What it is made of says whether it
reads numbers; of the whole (``torch.where`` with one argument, ``repeat_interleave``) torch does not know.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import Array, Structure, c_int64
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_READING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_COMPOSED = torch._C.DispatchKey.CompositeImplicitAutograd
_UNSEEN = frozenset({"aten::tensor_split.tensor_indices_or_sections"})  # reads the tensor and says so nowhere
_EMPTY = frozenset({"aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided"})
_OUT: Mapping[str, Callable[..., object]] = {  # a fifth of the time of finding and copying a new tensor
    "aten::add": torch.add,
    "aten::mul": torch.mul,
    "aten::div": torch.div,
    "aten::sigmoid": torch.sigmoid,
}


class Call(NamedTuple):
    """One call of a native function ``(level, address of call, threads)``.

    Attributes:
        owners: of the memory that ``call`` points to.
    """

    function: Callable[..., int]
    level: int
    threads: int
    call: Array[c_int64] | Structure
    owners: tuple[object, ...]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Inside it as a context, this thread's operations are noted as they run.

    Once there is a reason against a tape, nothing is noted or kept any more.

    Args:
        most_bytes: that ``results`` may take; more is such a reason.

    Attributes:
        steps: native calls, and torch's operations as functions of no arguments.
        results: tensors that were made, which a tape must keep, by the addresses of their memory.
        nbytes: of that memory.
        refusal: why there can be no tape; None if there can.
        is_too_large: the reason is ``most_bytes``.
    """

    def __init__(self, most_bytes: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Call | Callable[[], object]] = []
        self.results: dict[int, Tensor] = {}
        self.nbytes = 0
        self.refusal: str | None = None
        self.is_too_large = False
        self._most_bytes = most_bytes
        self._constants: set[int] = set()  # addresses of their memory
        self._outer: list[Recorder | None] = []  # whom leaving it gives the thread back to

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch asks; with its default the first operation imports its compiler: a second, 140 MiB."""
        return False

    def __enter__(self) -> Recorder:
        self._outer.append(_running.recorder)
        _running.recorder = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        _running.recorder = self._outer.pop()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def note_call(self, call: Call) -> None:
        if self.refusal is None:
            self.steps.append(call)

    def refuse(self, what: str) -> None:
        """``what`` was done, which can't be repeated."""
        self.refusal = self.refusal or what
        self.steps, self.results, self._constants, self.nbytes = [], {}, set(), 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        traits = _traits(func)
        if traits.is_refused:
            self.refuse(traits.name)
        if self.refusal is not None:
            return func(*args, **kwargs)
        if traits.is_composed:
            with self:
                return func._op_dk(_COMPOSED, *args, **kwargs)
        result = func(*args, **kwargs)
        self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        made = [r for r in _listed(result) if isinstance(r, Tensor)]
        traits = _traits(func)
        if traits.is_empty:
            self._keep(made)
            return
        given = [t for a in (*args, *kwargs.values()) for t in _listed(a) if isinstance(t, Tensor)]
        known = {_memory(tensor) for tensor in given}
        new = [tensor for tensor in made if _memory(tensor) not in known]
        if traits.is_mutable:
            if any(_memory(tensor) in self._constants for tensor in made):
                self.refuse(f"{traits.name} of a constant")
            else:
                self.steps.append(lambda: func(*args, **kwargs))
        elif known <= self._constants:
            self._constants.update(map(_memory, made))
        elif not made or traits.reads:
            self.refuse(traits.name)
        elif new:
            self.steps.append(_again(func, args, kwargs, made))
        self._keep(new)

    def _keep(self, made: Iterable[Tensor]) -> None:
        if self.refusal is not None:
            return
        for tensor in made:
            if self.results.setdefault(_memory(tensor), tensor) is tensor:
                self.nbytes += tensor.untyped_storage().nbytes()
        if self._most_bytes is not None and self.nbytes > self._most_bytes:
            self.is_too_large = True
            self.refuse(f"more than {self._most_bytes} bytes of intermediate results")


class _Traits(NamedTuple):
    """Of one of torch's operations.

    Attributes:
        is_composed: torch runs other operations for it; a kernel of its own for host memory would come first.
        is_refused: it gives other numbers each time, or reads some where no tag says so.
        is_empty: what it makes has no numbers yet.
        is_mutable: it writes to what it is given.
        reads: the numbers that it is given decide more than numbers.
    """

    name: str
    is_composed: bool
    is_refused: bool
    is_empty: bool
    is_mutable: bool
    reads: bool


@cache
def _traits(func: Any) -> _Traits:
    has, name, tags = torch._C._dispatch_has_kernel_for_dispatch_key, func.name(), set(func.tags)
    return _Traits(
        name=func._schema.name,
        is_composed=has(name, _COMPOSED) and not has(name, torch._C.DispatchKey.CPU),
        is_refused=name in _UNSEEN or torch.Tag.nondeterministic_seeded in tags,
        is_empty=func._schema.name in _EMPTY,
        is_mutable=func._schema.is_mutable,
        reads=bool(_READING & tags),
    )


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else (value,)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _again(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Tensor]) -> Callable[[], object]:
    """The operation once more, into the tensors that it made."""
    into = _OUT.get(func._schema.name)
    if into is not None and len(made) == 1:
        return lambda: into(*args, **kwargs, out=made[0])

    def run() -> None:
        found = func(*args, **kwargs)
        for old, new in zip(made, _listed(found), strict=True):
            if new.shape != old.shape:  # copy_ would spread it
                raise RuntimeError(f"{func._schema.name} gives {tuple(new.shape)}, recorded {tuple(old.shape)}")
            old.copy_(new)

    return run


class _Running(threading.local):
    recorder: Recorder | None = None


_running = _Running()


def recorder() -> Recorder | None:
    """The one that notes this thread's operations now."""
    return _running.recorder


def refuse(what: str) -> None:
    """``what`` is done now: if this thread's operations are being noted, they can't be repeated."""
    running = _running.recorder
    if running is not None:
        running.refuse(what)
