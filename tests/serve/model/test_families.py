"""Tiny models of every family in float32 against transformers: whole, in chunks, one by one, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit_serve.phase import Phase
from tests.serve.model.oracle import logits_of, reference_logits, runner, step, tokens, transformers_model
from tests.serve.model.tiny import CASES, checkpoint


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("family")
    path = checkpoint(folder / "checkpoint", CASES[request.param])
    return path, transformers_model(path, folder / "copy")


def test_logits_equal_transformers(pair: tuple[Path, Any]) -> None:
    path, model = pair
    ids = tokens(1, 37)
    expected = reference_logits(model, ids)
    found = runner(path)
    scale = expected.abs().max()
    whole = logits_of(found, ids)
    assert (whole - expected).abs().max() < 1e-4 * scale
    assert (whole.argmax(-1) == expected.argmax(-1)).all()
    chunked = logits_of(found, ids, cuts=(1, 16, 30), first=8)
    one_by_one = logits_of(found, ids, cuts=range(1, len(ids)), phase=Phase.DECODE, first=16)
    for other in (chunked, one_by_one):
        assert (other - expected).abs().max() < 1e-4 * scale


def test_sequences_of_a_step_do_not_meet(pair: tuple[Path, Any]) -> None:
    path, model = pair
    found = runner(path)
    texts = [tokens(seed, count) for seed, count in ((4, 5), (5, 33), (6, 1))]
    pages = [[3], [9, 2, 7], [0]]  # in no order
    whole = found.run(step(Phase.PREFILL, [(ids, 0, p) for ids, p in zip(texts, pages, strict=True)]))
    expected = torch.cat([reference_logits(model, ids) for ids in texts])
    assert (whole - expected).abs().max() < 1e-4 * expected.abs().max()
