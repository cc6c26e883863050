"""What an engine is, for answers that are kept: other code that computes is another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.errors import UsageError
from quantkit_evals.candidates.engine import EngineCandidate
from quantkit_evals.configuration import Configuration
from quantkit_kernels import registry
from quantkit_serve.start.servable import Servable


def identity(artifact: Path, monkeypatch: pytest.MonkeyPatch, kernels: str | None) -> object:
    monkeypatch.setattr(registry, "_chosen", None)
    if kernels is not None:
        monkeypatch.setenv(registry.ENV_BACKEND, kernels)
    return EngineCandidate(Servable(artifact, "tiny-w4"), Configuration("fp8")).identity()["engine"]["kernels"]


def test_the_backend_is_part_of_it(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native = identity(artifact, monkeypatch, None)
    assert identity(artifact, monkeypatch, "torch") == "torch" != native
    with pytest.raises(UsageError, match="QUANTKIT_KERNELS='fast' is not a backend"):
        identity(artifact, monkeypatch, "fast")
