"""One artifact of the bundled model for all tests of this folder; its two views differ."""

from __future__ import annotations

from pathlib import Path

import pytest

import quantkit


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("engine") / "tiny-w4"
    quantkit.convert(quantkit.plan("tiny-glm", method="rtn"), target).close()
    return target
