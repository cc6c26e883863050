"""Runs tests on every backend and instruction set that this machine has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quantkit_kernels import registry

from .backends import load, native_levels


@pytest.fixture(params=["torch", *native_levels()])
def each_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Makes one backend the active one: the twin, then the native code at each instruction-set level."""
    chosen = load(request.param)
    info = registry.BackendInfo(chosen.name, None, (), None, None, None)
    monkeypatch.setattr(registry, "_chosen", (chosen, info))
    yield request.param
