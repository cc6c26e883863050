"""Grouped-query families in float32 against transformers; whole, in chunks, token by token, several at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit_serve.phase import Phase
from tests.builders import write_moe
from tests.serve.model.oracle import logits_of, reference_logits, runner, step, tokens, transformers_model

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "glm4_moe": {"use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.5},
    "mixtral": {},
    "minimax_m2": {"rope_parameters": {"rope_theta": 5e6, "rope_type": "default", "partial_rotary_factor": 0.5}},
}


def checkpoint(folder: Path, family: str, settings: dict[str, Any], **options: Any) -> Path:
    """A tiny checkpoint with further settings in its config.json."""
    path = write_moe(folder / family, family, seed=3, **options)
    config = json.loads((path / "config.json").read_text()) | settings
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Any]:
    path = checkpoint(tmp_path, request.param, FAMILIES[request.param])
    return path, transformers_model(path, tmp_path / "copy")


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
