"""The backends that this machine can run: ``torch``, then the native levels."""

from __future__ import annotations

from quantkit_kernels.library import NativeMissing
from quantkit_kernels.native import Native
from quantkit_kernels.registry import Backend
from quantkit_kernels.torch_twin import TorchTwin


def native_levels() -> tuple[str, ...]:
    """Empty where the native library was not built."""
    try:
        return Native.load().isa_available
    except NativeMissing:
        return ()


def load(name: str) -> Backend:
    return TorchTwin() if name == "torch" else Native.load(name)
