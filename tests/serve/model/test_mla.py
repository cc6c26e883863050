"""Latent attention of one layer, dense and sparse, against transformers' modules in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.errors import SourceError, UnsupportedError
from quantkit.models.config import MlaShape
from quantkit_kernels.forward.weights import Fp8Weight
from quantkit_serve.model.mla import absorbed
from quantkit_serve.phase import Phase
from tests.serve.model.latent import (
    ModuleWeights,
    Ours,
    Request,
    Theirs,
    hidden_states,
    kernel_ops,
    outputs,
    reference_ops,
)

TOLERANCE = 2e-6  # of the largest output: sums in another order
HIDDEN, TOKENS = 48, 37
SIZES = {
    "hidden_size": HIDDEN, "num_attention_heads": 3, "num_key_value_heads": 3, "kv_lora_rank": 24,
    "q_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 14, "num_hidden_layers": 3,
    "max_position_embeddings": 512, "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
}  # fmt: skip
INDEX = {"index_topk": 6, "index_n_heads": 16, "index_head_dim": 12}  # heads: few ties of scores at zero
YARN = {
    "type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
    "original_max_position_embeddings": 16,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "deepseek-v3": {"model_type": "deepseek_v3", "rope_scaling": YARN},
    "kimi-k2": {"model_type": "deepseek_v3", "rope_scaling": YARN | {"beta_fast": 1.0}},
    "without q_lora": {"model_type": "deepseek_v3", "q_lora_rank": None},
    "half-split": {"model_type": "deepseek_v3", "rope_interleave": False},
    "biases": {"model_type": "deepseek_v3", "attention_bias": True},
    "deepseek-v3.2": {"model_type": "deepseek_v32", "rope_scaling": YARN, **INDEX},
    "glm": {"model_type": "glm_moe_dsa", "indexer_types": ["full"] * 3, **INDEX},
    "glm shared": {"model_type": "glm_moe_dsa", "indexer_types": ["full", "shared", "shared"], **INDEX},
    "glm by frequency": {"model_type": "glm_moe_dsa", "index_topk_freq": 2, "index_skip_topk_offset": 1, **INDEX},
}


def config(case: str, **changes: Any) -> dict[str, Any]:
    return {**SIZES, **CASES[case], **changes}


def assert_close(ours: list[Tensor], theirs: list[Tensor], tolerance: float = TOLERANCE) -> None:
    for layer, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        error = float((a - b).abs().max() / b.abs().max())
        assert error < tolerance, f"layer {layer}: {error}"


@pytest.fixture(params=CASES)
def pair(request: pytest.FixtureRequest) -> tuple[dict[str, Any], Theirs]:
    text = config(request.param)
    return text, Theirs(text, layers=3)


def test_chunks_of_any_size_equal_transformers(pair: tuple[dict[str, Any], Theirs]) -> None:
    text, theirs = pair
    hidden = hidden_states(TOKENS, HIDDEN)
    expected = theirs(hidden)
    for sizes in ((TOKENS,), (5, 16, 1, 15), (1,) * TOKENS):
        ours, request = Ours(theirs, text, reference_ops()), Request(hidden, [7, 2, 9, 0, 4])
        for size in sizes:
            ours.run([(request, size)], Phase.DECODE if size == 1 else Phase.PREFILL)
        assert_close(outputs(request), expected)


def test_batched_with_others_equals_transformers(pair: tuple[dict[str, Any], Theirs]) -> None:
    """Prompts of several lengths in one step, then decode steps, one of them with two tokens of a request."""
    text, theirs = pair
    ours = Ours(theirs, text, reference_ops())
    requests = [
        Request(hidden_states(n, HIDDEN, seed), range(16 * seed, 16 * seed + 8))
        for seed, n in enumerate((37, 9, 21))
    ]
    ours.run([(requests[0], 20), (requests[1], 3)])
    ours.run([(requests[2], 15), (requests[0], 11)])
    ours.run([(requests[1], 1), (requests[2], 1), (requests[0], 1)], Phase.DECODE)
    ours.run([(requests[0], 2), (requests[2], 1)], Phase.DECODE)
    for request in requests:
        assert_close(outputs(request), [out[: request.done] for out in theirs(request.hidden)])


@pytest.mark.parametrize("case", ["deepseek-v3.2", "glm shared"])
def test_choice_matters(case: str) -> None:
    """The tests above could not tell sparse from dense attention if it did not."""
    hidden = hidden_states(TOKENS, HIDDEN)
    sparse, dense = Theirs(config(case), 3)(hidden), Theirs(config(case, index_topk=64), 3)(hidden)
    for a, b in zip(sparse, dense, strict=True):
        assert torch.allclose(a[:6], b[:6], atol=1e-6)
        assert float((a[6:] - b[6:]).abs().max() / b.abs().max()) > 0.01


@pytest.mark.parametrize("ops", [reference_ops, kernel_ops])
def test_choosing_all_is_dense_attention_bit_for_bit(ops: Any) -> None:
    """Decode steps: contexts up to ``index_topk``, against the same weights without an indexer."""
    text, steps = config("glm", index_topk=TOKENS), (1,) * TOKENS
    theirs, hidden = Theirs(text), hidden_states(TOKENS, HIDDEN)
    found = []
    for own in (text, {key: value for key, value in text.items() if not key.startswith("index")}):
        ours, request = Ours(theirs, own, ops()), Request(hidden, [7, 2, 9, 0, 4])
        assert len(ours.layers[0].kinds) == (2 if own is text else 1)
        for size in steps:
            ours.run([(request, size)], Phase.DECODE)
        found.append(outputs(request)[0])
    assert torch.equal(*found)


def test_one_key_more_than_are_chosen_drops_the_least() -> None:
    """Up to ``index_topk`` positions nothing is scored: the border is where it should be."""
    text = config("glm", index_topk=TOKENS - 1)
    theirs, hidden = Theirs(text), hidden_states(TOKENS, HIDDEN)
    ours, request = Ours(theirs, text, reference_ops()), Request(hidden, range(5))
    for size in (TOKENS - 2, 1, 1):
        ours.run([(request, size)])
    assert_close(outputs(request), theirs(hidden))


def test_layers_that_share_a_choice_have_no_index_pages() -> None:
    ours = Ours(Theirs(config("glm shared"), 3), config("glm shared"), reference_ops())
    assert [[type(kind).__name__ for kind in layer.kinds] for layer in ours.layers] == [
        ["MlaPages", "IndexPages"], ["MlaPages"], ["MlaPages"],
    ]  # fmt: skip


def test_each_phase_has_its_own_weights() -> None:
    text, hidden = config("glm"), hidden_states(TOKENS, HIDDEN)
    theirs = Theirs(text, seed=1), Theirs(text, seed=2)
    weights = ModuleWeights(theirs[0].layers[0], torch.float32, decode=theirs[1].layers[0])
    for phase, own in zip((Phase.PREFILL, Phase.DECODE), theirs, strict=True):
        own.layers[0].kv_a_layernorm.weight = theirs[0].layers[0].kv_a_layernorm.weight  # norms are shared
        own.layers[0].q_a_layernorm.weight = theirs[0].layers[0].q_a_layernorm.weight
        own.layers[0].indexer.k_norm = theirs[0].layers[0].indexer.k_norm
        ours, request = Ours(theirs[0], text, reference_ops(), weights=[weights]), Request(hidden, range(5))
        ours.run([(request, TOKENS)], phase)
        assert_close(outputs(request), own(hidden))
    attention = ours.layers[0]
    assert attention.absorbed.prefill is not attention.absorbed.decode
    assert attention.derived_bytes == 2 * 4 * 24 * 3 * (10 + 14)


def test_equal_weights_are_absorbed_once() -> None:
    attention = Ours(Theirs(config("glm")), config("glm"), kernel_ops()).layers[0]
    assert attention.absorbed.prefill is attention.absorbed.decode
    assert attention.derived_bytes == 2 * 24 * 3 * (10 + 14)


def test_fp8_is_absorbed_as_the_numbers_that_its_codes_stand_for() -> None:
    """Blocks of scales that end within a head."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(3 * 24, 136, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(5, 2, generator=generator)
    weight = Fp8Weight(codes, scale, (16, 128))
    dense = codes.float() * scale.repeat_interleave(16, 0)[:72].repeat_interleave(128, 1)[:, :136]
    sizes = MlaShape(kv_lora_rank=136, rope=8, nope=10, value=14, q_lora_rank=None)
    for ops in (reference_ops(), kernel_ops()):
        found = absorbed(weight, 3, sizes, ops)
        for head in range(3):
            rows = dense[24 * head : 24 * (head + 1)].to(ops.dtype)
            assert torch.equal(found.key[head].T, rows[:10])
            assert torch.equal(found.value[head], rows[10:])


@pytest.mark.parametrize(
    ("case", "changes", "words"),
    [
        ("glm", {"indexer_types": ["shared", "full", "full"]}, "first one full"),
        ("glm", {"indexer_types": ["full"]}, "each of 3 layers"),
        ("glm", {"index_n_heads": 0}, "index_n_heads is 0"),
        ("glm", {"index_topk": None}, "index_topk is None"),
        ("glm", {"index_head_dim": 6}, "qk_rope_head_dim is 8"),
        ("glm", {"v_head_dim": 15}, r"kv_b_proj: 72 rows; accepted: 75"),
        ("glm", {"kv_lora_rank": 25}, r"kv_a_proj_with_mqa: 32 rows; accepted: 33"),
        ("glm", {"index_n_heads": 17}, r"indexer.wq_b: 192 rows; accepted: 204"),
        ("glm", {"q_lora_rank": None}, "q_proj"),
    ],
)
def test_what_does_not_fit_is_named_at_load(case: str, changes: dict[str, Any], words: str) -> None:
    theirs = Theirs(config(case))
    with pytest.raises((SourceError, AttributeError), match=words):
        Ours(theirs, config(case, **changes), reference_ops())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_lora_rank": 520}, "kv_lora_rank is 520; accepted: at most 512"),
        ({"qk_rope_head_dim": 72, "index_head_dim": 128}, "qk_rope_head_dim is 72; accepted: at most 64"),
        ({"index_head_dim": 136}, "index_head_dim is 136; accepted: at most 128"),
    ],
)
def test_sizes_that_the_kernels_cannot_take(changes: dict[str, Any], words: str) -> None:
    text = config("glm", **changes)
    theirs = Theirs(text)
    with pytest.raises(UnsupportedError, match=words):
        Ours(theirs, text, kernel_ops())
    ours, request = Ours(theirs, text, reference_ops()), Request(hidden_states(TOKENS, HIDDEN), range(5))
    ours.run([(request, TOKENS)])
    assert_close(outputs(request), theirs(request.hidden))
