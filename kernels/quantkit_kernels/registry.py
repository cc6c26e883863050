"""Which implementation runs: explicit, explained, forcible.

``QUANTKIT_KERNELS=torch|cpu|triton`` forces a backend; without it conversions run natively where that was built,
else in the torch twin, with one warning that says why. Triton converts only when it is forced:
reading, hashing and writing bound a conversion, not the arithmetic. The choice is made at the first operation and
kept.
"""

from __future__ import annotations

import os
import threading
import warnings
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, Protocol

from .search import Method
from .types import F32, I32, I64, U8, U16, Int4Weight

ENV_BACKEND = "QUANTKIT_KERNELS"
NAMES = ("cpu", "torch", "triton")


class Backend(Protocol):
    """What a backend implements; arguments are checked by ``ops``, meanings are documented there."""

    name: str

    def fp8_to_float32(self, codes: U8, scales: F32, block: tuple[int, int], row_offset: int) -> F32: ...

    def fp8_to_bf16(self, codes: U8, scales: F32, block: tuple[int, int], row_offset: int) -> U16: ...

    def fp8_to_int4(
        self,
        codes: U8,
        scales: F32,
        block: tuple[int, int],
        row_offset: int,
        group_size: int,
        method: Method,
        counts: I64 | None = None,
    ) -> Int4Weight: ...

    def float_to_int4(
        self,
        weight: F32 | U16,
        row_offset: int,
        group_size: int,
        method: Method,
        importance: F32 | None = None,
        counts: I64 | None = None,
    ) -> Int4Weight: ...

    def int4_to_float32(self, packed: I32, scale: U16, columns: int, group_size: int) -> F32: ...

    def int4_to_bf16(self, packed: I32, scale: U16, columns: int, group_size: int) -> U16: ...

    def float_to_fp8(self, weight: F32 | U16, row_offset: int, block: tuple[int, int]) -> tuple[U8, F32]: ...

    def bf16_to_float32(self, bits: U16) -> F32: ...

    def float32_to_bf16(self, values: F32) -> U16: ...


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """The backend in use.

    Attributes:
        name: ``cpu`` (native), ``torch`` (twin) or ``triton``.
        isa: instruction set of the native code (``library.ISA_LEVELS``), None for the others.
        isa_available: what this processor and this build can run.
        forced: value of QUANTKIT_KERNELS, None if unset.
        why_not_cpu: why the native code is off, None if it is in use.
        library: file name of the native library, None if there is none.
    """

    name: str
    isa: str | None
    isa_available: tuple[str, ...]
    forced: str | None
    why_not_cpu: str | None
    library: str | None


_lock = threading.Lock()
_chosen: tuple[Backend, BackendInfo] | None = None


def active() -> Backend:
    """The backend of this process, chosen at the first call."""
    return _choice()[0]


def backend() -> BackendInfo:
    """Which backend is in use and why.

    Raises:
        ValueError: QUANTKIT_KERNELS or QUANTKIT_CPU_ISA has an unknown value, or asks for what is not there.
    """
    return _choice()[1]


def describe() -> dict[str, Any]:
    """``backend()`` as a plain dict with every backend under ``backends``, for ``quantkit env``.

    A wrong setting is reported under ``problem``.
    """
    from .backends import describe_backends

    try:
        chosen = asdict(backend())
    except ValueError as error:
        chosen = {"name": None, "forced": os.environ.get(ENV_BACKEND), "problem": str(error)}
    return chosen | {"backends": describe_backends()}


def _choice() -> tuple[Backend, BackendInfo]:
    global _chosen
    if _chosen is None:
        with _lock:
            if _chosen is None:
                _chosen = _choose(os.environ.get(ENV_BACKEND) or None)
    return _chosen


def _choose(forced: str | None) -> tuple[Backend, BackendInfo]:
    if forced is not None and forced not in NAMES:
        raise ValueError(f"{ENV_BACKEND}={forced!r} is not a backend; accepted: {', '.join(NAMES)}")
    from .torch_twin import TorchTwin

    if forced == "torch":
        why = f"{ENV_BACKEND}=torch"
        return TorchTwin(), BackendInfo("torch", None, (), forced, why, None)
    if forced == "triton":
        return _triton(), BackendInfo("triton", None, (), forced, f"{ENV_BACKEND}=triton", None)
    from .library import NativeMissing
    from .native import Native

    try:
        native = Native.load()
    except NativeMissing as missing:
        if forced == "cpu":
            raise ValueError(f"{ENV_BACKEND}=cpu, but {missing}") from missing
        warnings.warn(
            f"quantkit_kernels: {missing}; using the torch twin, which gives the same bytes but is much slower",
            RuntimeWarning,
            stacklevel=2,
        )
        return TorchTwin(), BackendInfo("torch", None, (), forced, str(missing), None)
    return native, BackendInfo("cpu", native.isa, native.isa_available, forced, None, native.library)


def _triton() -> Backend:
    from .backends import why_not_triton

    missing = why_not_triton()
    if missing is not None:
        raise ValueError(f"{ENV_BACKEND}=triton, but {missing}")
    module = import_module(".forward.triton.conversion", __package__)  # by name: only there may triton be imported
    chosen: Backend = module.TritonBackend()
    return chosen
