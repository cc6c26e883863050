"""Which implementation runs: explicit, explained, forcible.

``QUANTKIT_KERNELS=torch|cpu`` forces a backend; without it the native one is used where it was built, else the
torch twin, with one warning that says why. The choice is made at the first operation and kept.
"""

from __future__ import annotations

import os
import threading
import warnings
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from .search import Method
from .types import F32, I32, U8, U16, Int4Weight

ENV_BACKEND = "QUANTKIT_KERNELS"
NAMES = ("cpu", "torch")


class Backend(Protocol):
    """What a backend implements; arguments are checked by ``ops``, meanings are documented there."""

    name: str

    def fp8_to_float32(self, codes: U8, scales: F32, block: tuple[int, int], row_offset: int) -> F32: ...

    def fp8_to_bf16(self, codes: U8, scales: F32, block: tuple[int, int], row_offset: int) -> U16: ...

    def fp8_to_int4(
        self, codes: U8, scales: F32, block: tuple[int, int], row_offset: int, group_size: int, method: Method
    ) -> Int4Weight: ...

    def float_to_int4(
        self, weight: F32 | U16, row_offset: int, group_size: int, method: Method, importance: F32 | None = None
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
        name: ``cpu`` (native) or ``torch`` (twin).
        isa: instruction set of the native code (``library.ISA_LEVELS``), None for the twin.
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
    """``backend()`` as a plain dict, for ``quantkit env``; a wrong setting is reported under ``problem``."""
    try:
        return asdict(backend())
    except ValueError as error:
        return {"name": None, "forced": os.environ.get(ENV_BACKEND), "problem": str(error)}


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
