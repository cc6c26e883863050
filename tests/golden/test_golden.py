"""The bytes of a fixed small artifact are pinned; ``regenerate.py`` says when they may change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.golden.regenerate import CASES, GOLDEN, build, digests


@pytest.mark.parametrize("case", CASES)
def test_core_bytes(case: str, tmp_path: Path) -> None:
    golden = json.loads(GOLDEN.read_text())[case]
    found = digests(build(case, tmp_path))
    assert found["source_tensor_root"] == golden["source_tensor_root"], "the builder made another model"
    different = sorted(name for name in golden.keys() | found.keys() if golden.get(name) != found.get(name))
    assert not different


def test_every_case_is_pinned() -> None:
    assert json.loads(GOLDEN.read_text()).keys() == CASES.keys()
