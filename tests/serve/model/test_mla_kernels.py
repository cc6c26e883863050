"""Latent attention on the kernels, sizes of the published models, against transformers in float32.

Bounds are relative to the largest output, or root mean square over root mean square.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit_serve.phase import Phase
from tests.serve.model.latent import Ours, Request, Theirs, hidden_states, kernel_ops, outputs, reference_ops
from tests.serve.model.test_mla import YARN

HIDDEN, TOKENS, CHOSEN = 96, 44, 16
SIZES = {
    "hidden_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 512,
    "q_lora_rank": 64, "qk_nope_head_dim": 48, "qk_rope_head_dim": 64, "v_head_dim": 40, "num_hidden_layers": 2,
    "max_position_embeddings": 512, "rope_theta": 10000.0,
}  # fmt: skip
INDEX = {"index_n_heads": 16, "index_head_dim": 128}
CASES: dict[str, dict[str, Any]] = {
    "deepseek-v3": {"model_type": "deepseek_v3", "rope_scaling": YARN},
    "deepseek-v3.2": {"model_type": "deepseek_v32", "rope_scaling": YARN, **INDEX},
    "glm": {"model_type": "glm_moe_dsa", "indexer_types": ["full", "shared"], **INDEX},
}
BOUNDS = {("bf16", "rounded"): (0.02, 0.01), ("fp8", "rounded"): (0.08, 0.05), ("fp8", "fresh"): (0.05, 0.03)}


def config(case: str, top_k: int = TOKENS) -> dict[str, Any]:
    return {**SIZES, **CASES[case], **({} if case == "deepseek-v3" else {"index_topk": top_k})}


def run(ours: Ours, hidden: Tensor) -> Request:
    """Two chunks, then token by token."""
    request = Request(hidden, [9, 3, 0, 5, 7, 1])
    for size in (20, 11):
        ours.run([(request, size)])
    while request.done < len(hidden):
        ours.run([(request, 1)], Phase.DECODE)
    return request


@pytest.mark.parametrize("kv", BOUNDS)
@pytest.mark.parametrize("case", CASES)
def test_all_positions_within_the_stated_bounds(case: str, kv: tuple[str, Any]) -> None:
    theirs, hidden = Theirs(config(case), 2), hidden_states(TOKENS, HIDDEN)
    found = outputs(run(Ours(theirs, config(case), kernel_ops(kv[0], prefill_kv=kv[1])), hidden))
    for ours, expected in zip(found, theirs(hidden), strict=True):
        error = ours - expected
        assert float(error.abs().max() / expected.abs().max()) < BOUNDS[kv][0]
        assert float(error.norm() / expected.norm()) < BOUNDS[kv][1]
        assert float(error.norm() / expected.norm()) > 1e-4  # it is the kernels that ran


@pytest.mark.parametrize(("kv", "least"), [("bf16", 0.97), ("fp8", 0.9)])
@pytest.mark.parametrize("case", ["deepseek-v3.2", "glm"])
def test_choices_agree_with_the_reference(case: str, kv: str, least: float) -> None:
    """Chosen sets differ in positions whose scores are nearly equal; where they agree the bounds hold."""
    text, hidden = config(case, CHOSEN), hidden_states(TOKENS, HIDDEN)
    theirs = Theirs(text, 2)
    kernels, reference = Ours(theirs, text, kernel_ops(kv)), Ours(theirs, text, reference_ops())
    found, expected = run(kernels, hidden), run(reference, hidden)
    for layer, (ours, right) in enumerate(zip(outputs(found), outputs(expected), strict=True)):
        pairs = list(zip(kernels.chosen(layer), reference.chosen(layer), strict=True))
        assert all(len(a) == len(b) == min(t + 1, CHOSEN) for t, (a, b) in enumerate(pairs))
        assert sum(len(a & b) for a, b in pairs) / sum(len(a) for a, _ in pairs) > least
        rows = torch.tensor([a == b for a, b in pairs])
        assert rows[CHOSEN:].any()
        error = float((ours - right)[rows].norm() / right[rows].norm())
        assert error < BOUNDS[kv, "rounded"][1]


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize("case", CASES)
def test_chunks_and_batches_change_no_bit(case: str, kv: str) -> None:
    """Pages hold a chunk's own tokens rounded, so neither its borders nor other requests matter.

    ``deterministic``: products of heads have one order of sums.
    """
    text, hidden = config(case, CHOSEN), hidden_states(TOKENS, HIDDEN)
    theirs = Theirs(text, 2)
    alone = outputs(run(Ours(theirs, text, kernel_ops(kv, deterministic=True)), hidden))
    ours, request = Ours(theirs, text, kernel_ops(kv, deterministic=True)), Request(hidden, [2, 4, 6, 8, 10, 12])
    other = Request(hidden_states(TOKENS, HIDDEN, 1), range(20, 26))
    for size, further in ((3, 17), (25, 9), (3, 2)):
        ours.run([(other, further), (request, size)])
    while request.done < TOKENS:
        ours.run([(request, 1), (other, 1)], Phase.DECODE)
    for a, b in zip(alone, outputs(request), strict=True):
        assert torch.equal(a, b)
