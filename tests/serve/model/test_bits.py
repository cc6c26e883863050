"""A token's logits have the same bits alone, in a batch, in chunks and for any number of threads.

Of the KV precisions it does not matter which; of ``prefill_kv`` it does: ``fresh`` rounds what lies in pages and
not what lies in the chunk.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit_serve.model.runner import ModelRunner
from quantkit_serve.phase import Phase
from tests.serve.model.oracle import logits_of, runner, step, tokens
from tests.serve.model.tiny import CASES, checkpoint

SETTINGS: dict[str, dict[str, Any]] = {
    "bfloat16, fp8": {"compute": "bfloat16", "cache": {"kv_dtype": "fp8"}},
    "bfloat16, bf16": {"compute": "bfloat16", "cache": {"kv_dtype": "bf16"}},
    "float32, f32": {"compute": "float32", "cache": {"kv_dtype": "f32"}},
    "float32, bf16": {"compute": "float32", "cache": {"kv_dtype": "bf16"}},
}
FAMILIES = ("qwen3_moe in BF16, tied", "glm4_moe, groups, no norms", "minimax_m2", "deepseek_v3", "glm_moe_dsa")


@pytest.fixture(scope="module", params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("bits") / "checkpoint", CASES[request.param])


@pytest.fixture(params=SETTINGS)
def found(request: pytest.FixtureRequest, path: Path) -> ModelRunner:
    return runner(path, deterministic=True, **SETTINGS[request.param])


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def test_chunks(found: ModelRunner) -> None:
    ids = tokens(1, 70)
    whole = logits_of(found, ids)
    for first, cuts in ((8, (1, 2, 33)), (16, (16, 32, 48, 64)), (24, range(7, 70, 7)), (32, (69,))):
        assert same(logits_of(found, ids, cuts=cuts, first=first), whole)


def test_company(found: ModelRunner) -> None:
    """The same sequences in steps of one and of all, in both phases."""
    texts = [tokens(seed, count) for seed, count in ((2, 19), (3, 1), (4, 33), (5, 9), (6, 17), (7, 2))]
    alone = [logits_of(found, ids) for ids in texts]
    pages = [[20 + 3 * i, 21 + 3 * i, 22 + 3 * i] for i in range(len(texts))]
    runs = [(ids, 0, p) for ids, p in zip(texts, pages, strict=True)]
    for order in ((0, 1, 2, 3, 4, 5), (5, 2, 0, 4, 1, 3)):
        together = found.run(step(Phase.PREFILL, [runs[i] for i in order]))
        assert same(together, torch.cat([alone[i] for i in order]))
    more = [tokens(20 + i, 1) for i in range(len(texts))]
    nexts = [(more[i], len(texts[i]), pages[i]) for i in range(len(texts))]
    lonely = torch.cat([found.run(step(Phase.DECODE, [run])) for run in nexts])
    assert same(found.run(step(Phase.DECODE, nexts)), lonely)


def test_threads(path: Path) -> None:
    found = runner(path, compute="bfloat16", cache={"kv_dtype": "fp8"})
    ids, before = tokens(8, 40), torch.get_num_threads()
    alone = logits_of(found, ids)
    decoded = found.run(step(Phase.DECODE, [(tokens(9, 1), 40, [0, 1, 2])]))
    try:
        torch.set_num_threads(2)
        assert same(logits_of(found, ids, first=8), alone)
        assert same(found.run(step(Phase.DECODE, [(tokens(9, 1), 40, [8, 9, 10])])), decoded)
    finally:
        torch.set_num_threads(before)
