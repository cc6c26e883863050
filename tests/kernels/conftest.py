"""Runs tests on every backend and instruction set that this machine has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quantkit_kernels import registry
from quantkit_kernels.native import Native, NativeMissing
from quantkit_kernels.torch_twin import TorchTwin


def native_levels() -> tuple[str, ...]:
    try:
        return Native.load().isa_available
    except NativeMissing:
        return ()


@pytest.fixture(params=["torch", *native_levels()])
def each_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Makes one backend the active one: the twin, then the native code at each instruction-set level."""
    twin = TorchTwin()
    chosen: registry.Backend = twin if request.param == "torch" else Native.load(request.param)
    info = registry.BackendInfo(chosen.name, None, (), None, None, None)
    monkeypatch.setattr(registry, "_chosen", (chosen, info))
    yield request.param
