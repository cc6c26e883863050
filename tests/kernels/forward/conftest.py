"""Runs tests on every implementation that this machine has in host memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quantkit_kernels.forward import choice
from quantkit_kernels.library import Library, NativeMissing
from quantkit_kernels.openmp import lend


def native_levels() -> tuple[str, ...]:
    """Empty where the native library was not built."""
    try:
        return Library.load().isa_available
    except NativeMissing:
        return ()


def use(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch``, or a level of the native library."""
    if name == "torch":
        monkeypatch.setattr(choice, "backend_for", lambda like: "torch")
        return
    library = Library.load(name)
    lend(library)
    monkeypatch.setattr(choice, "backend_for", lambda like: "cpu")
    monkeypatch.setattr(choice, "library", lambda: library)


@pytest.fixture(params=["torch", *native_levels()])
def each_implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The twin, then the native code at each instruction-set level."""
    use(request.param, monkeypatch)
    yield request.param


@pytest.fixture(params=native_levels() or [pytest.param("", marks=pytest.mark.skip("no native library"))])
def each_level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The native code at each instruction-set level."""
    use(request.param, monkeypatch)
    yield request.param
