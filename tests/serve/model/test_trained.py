"""The bundled, trained models on held-out text: float32 against transformers, kernels within bounds.

Bounds are on what differs from transformers' float32 with the same FP8 weights: the largest gap between the two
best logits at which another token may come out best, and the mean KL divergence. transformers' own bfloat16 has a
mean divergence of 0.010 (GLM) and 0.0002 (Qwen3) on these texts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.data import bundled_model, bundled_text
from tests.serve.model.oracle import logits_of, reference_logits, runner, transformers_model

TOKENS = 320
CASES: tuple[tuple[str, dict[str, Any], dict[str, Any], float, float], ...] = (
    ("tiny-glm", {"compute": "bfloat16"}, {"kv_dtype": "bf16"}, 0.6, 0.004),
    ("tiny-glm", {"compute": "bfloat16"}, {"kv_dtype": "fp8"}, 1.0, 0.03),
    ("tiny-glm", {"compute": "bfloat16", "fp8_activations": "dynamic128"}, {"kv_dtype": "bf16"}, 3.5, 0.03),
    ("tiny-qwen3", {"compute": "bfloat16"}, {"kv_dtype": "bf16"}, 0.05, 0.0003),
    ("tiny-qwen3", {"compute": "bfloat16"}, {"kv_dtype": "fp8"}, 0.2, 0.002),
    ("tiny-qwen3", {"compute": "bfloat16", "fp8_activations": "dynamic128"}, {"kv_dtype": "bf16"}, 0.3, 0.002),
)


class Expected:
    """A text of ``TOKENS`` tokens and transformers' float32 logits of it."""

    def __init__(self, name: str, folder: Path) -> None:
        from tokenizers import Tokenizer

        self.source = bundled_model(name)
        text = bundled_text("heldout").read_text(encoding="utf-8")[: 8 * TOKENS]
        tokenizer = Tokenizer.from_file(str(self.source / "tokenizer.json"))
        self.ids: list[int] = tokenizer.encode(text).ids[:TOKENS]
        self.logits = reference_logits(transformers_model(self.source, folder), self.ids)
        best = self.logits.topk(2).values
        self.gap = best[:, 0] - best[:, 1]

    def divergence(self, logits: Tensor) -> float:
        """Mean over tokens of KL(theirs, ours), in nats."""
        theirs, ours = self.logits.log_softmax(-1), logits.log_softmax(-1)
        return float((theirs.exp() * (theirs - ours)).sum(-1).mean())


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Expected]:
    folder = tmp_path_factory.mktemp("trained")
    return {name: Expected(name, folder / name) for name in ("tiny-glm", "tiny-qwen3")}


@pytest.mark.parametrize("name", ["tiny-glm", "tiny-qwen3"])
def test_float32_chooses_the_same_tokens(expected: dict[str, Expected], name: str) -> None:
    want = expected[name]
    logits = logits_of(runner(want.source), want.ids, cuts=(64, 192))
    assert (logits.argmax(-1) == want.logits.argmax(-1)).all()
    assert want.divergence(logits) < 1e-5


@pytest.mark.parametrize("name, model, cache, gap, divergence", CASES)
def test_kernels_choose_the_same_tokens_where_it_is_clear(
    expected: dict[str, Expected], name: str, model: dict[str, Any], cache: dict[str, Any], gap: float,
    divergence: float,
) -> None:  # fmt: skip
    want = expected[name]
    logits = logits_of(runner(want.source, cache=cache, **model), want.ids, cuts=(128,))
    is_other = logits.argmax(-1) != want.logits.argmax(-1)
    assert not (is_other & (want.gap > gap)).any(), float(want.gap[is_other].max())
    assert is_other.float().mean() < 0.1
    assert 0 < want.divergence(logits) < divergence


def test_rounded_keys_make_chunks_equal_and_fresh_ones_do_not(expected: dict[str, Expected]) -> None:
    want = expected["tiny-qwen3"]
    logits = {}
    for mode in ("rounded", "fresh"):
        found = runner(want.source, compute="bfloat16", cache={"kv_dtype": "fp8"}, prefill_kv=mode)
        logits[mode] = [
            logits_of(found, want.ids, cuts=cuts, first=first) for cuts, first in (((), 0), ((64,), 32))
        ]
    assert torch.equal(*logits["rounded"])
    assert not torch.equal(*logits["fresh"])
    assert want.divergence(logits["fresh"][0]) < want.divergence(logits["rounded"][0])  # nothing rounded was read
