"""Runs the Triton kernels in Triton's interpreter (TRITON_INTERPRET, tests/conftest.py), in host memory."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Any

import pytest

from quantkit_kernels.forward import choice

HAS_WHEEL = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")

if not HAS_WHEEL:
    collect_ignore_glob = ["test_*.py"]
else:
    from triton.runtime import interpreter

    _patched: set[str] = set()

    def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As ``InterpretedFunction.__call__``, which patches triton's modules anew whenever a kernel calls a
        function: most of the interpreter's time. Ours see what was patched when the kernel started.
        """
        module = self.fn.__module__
        if module.startswith("triton.") and module not in _patched:
            _patched.add(module)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = _call


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Arithmetic with NaN and Inf, which the interpreter does in numpy, is meant."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"))


@pytest.fixture
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The public functions run the Triton kernels."""
    monkeypatch.setattr(choice, "backend_for", lambda like: "triton")
