"""The native backend."""

from __future__ import annotations

from .torch_twin import TorchTwin


class NativeMissing(Exception):
    """The native library cannot be used; the message says why."""


class Native(TorchTwin):
    name = "cpu"
    isa = "portable"
    isa_available: tuple[str, ...] = ()
    library = ""

    @classmethod
    def load(cls, isa: str | None = None) -> Native:
        raise NativeMissing("the native library was not built (no file libquantkit_kernels*.so in the package)")
