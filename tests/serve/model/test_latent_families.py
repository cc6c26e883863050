"""Whole models with latent attention against transformers: float32 on FP8 weights; bfloat16 on the kernels."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quantkit.data import bundled_model
from quantkit_serve.model.runner import ModelRunner
from quantkit_serve.phase import Phase
from tests.builders import Raw, bf16, f32, fp8_block, moe, write_checkpoint
from tests.serve.model.oracle import PAGE, logits_of, reference_logits, runner, step, tokens, transformers_model

HEADS, HIDDEN, LAYERS = 4, 256, 3
TINY = {
    "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "index_head_dim": 32,
}  # fmt: skip
PUBLISHED = {**TINY, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
INDEX_HEADS = 16  # with few of them scores are often equal (zero), and which are chosen is open
YARN = {
    "type": "yarn", "factor": 8, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
    "original_max_position_embeddings": 64,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "glm_moe_dsa": {"index_topk": 12, "indexer_types": ["full", "shared", "full"]},
    "deepseek_v3": {"rope_scaling": YARN, "n_group": 2, "topk_group": 1},
    "deepseek_v32": {"rope_scaling": YARN, "index_topk": 12},
    "kimi_k2": {"rope_scaling": YARN | {"beta_fast": 1}},
}


def checkpoint(folder: Path, family: str, sizes: dict[str, int], **changes: Any) -> Path:
    """A checkpoint in FP8 whose attention has other sizes than ``tests.builders``'."""
    settings = {**FAMILIES[family], **changes}
    tensors, config = moe(family, layers=LAYERS, mtp=False, seed=3)
    has_indexer = "index_topk" in config
    config |= {**sizes, **settings, "head_dim": sizes["qk_rope_head_dim"]}
    if has_indexer:
        config["index_n_heads"] = INDEX_HEADS
    else:
        del config["index_head_dim"]
    tensors = {name: tensor for name, tensor in tensors.items() if ".self_attn." not in name}
    for layer in range(LAYERS):
        runs_indexer = has_indexer and settings.get("indexer_types", ["full"] * LAYERS)[layer] == "full"
        tensors |= attention(f"model.layers.{layer}.self_attn", sizes, layer, runs_indexer)
    return write_checkpoint(folder / family, tensors, config, shards=2)


def attention(at: str, sizes: dict[str, int], seed: int, runs_indexer: bool) -> dict[str, Raw]:
    rng = np.random.default_rng(seed)
    q, kv, nope, rope, value, index = sizes.values()
    linears = {
        "q_a_proj": (q, HIDDEN), "q_b_proj": (HEADS * (nope + rope), q), "kv_a_proj_with_mqa": (kv + rope, HIDDEN),
        "kv_b_proj": (HEADS * (nope + value), kv), "o_proj": (HIDDEN, HEADS * value),
    }  # fmt: skip
    norms = {"q_a_layernorm.weight": q, "kv_a_layernorm.weight": kv}
    found: dict[str, Raw] = {}
    if runs_indexer:
        linears |= {"indexer.wq_b": (INDEX_HEADS * index, q), "indexer.wk": (index, HIDDEN)}
        norms |= {"indexer.k_norm.weight": index, "indexer.k_norm.bias": index}
        found[f"{at}.indexer.weights_proj.weight"] = bf16(rng.standard_normal((INDEX_HEADS, HIDDEN)) * 0.05)
    for name, shape in linears.items():
        found |= fp8_block(f"{at}.{name}", (rng.standard_normal(shape) * 0.08).astype(np.float32))
    for name, width in norms.items():
        values = rng.standard_normal(width) * 0.1 + (0 if name.endswith("bias") else 1)
        found[f"{at}.{name}"] = (f32 if "k_norm" in name else bf16)(values.astype(np.float32))
    return found


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    path = checkpoint(folder, request.param, TINY)
    return path, transformers_model(path, folder / "copy")


def greedy(found: ModelRunner, prompt: Sequence[int], count: int) -> list[int]:
    """Prompt in two chunks by prefill, then token by token by decode steps."""
    ids, pages = list(prompt), list(range(1, 2 + (len(prompt) + count) // PAGE))
    half = len(prompt) // 2
    found.run(step(Phase.PREFILL, [(ids[:half], 0, pages)]))
    logits = found.run(step(Phase.PREFILL, [(ids[half:], half, pages)], last_only=True))
    while len(ids) < len(prompt) + count:
        ids.append(int(logits[-1].argmax()))
        logits = found.run(step(Phase.DECODE, [(ids[-1:], len(ids) - 1, pages)]))
    return ids


def test_logits_equal_transformers(pair: tuple[Path, Any]) -> None:
    path, model = pair
    ids = tokens(1, 41)
    expected = reference_logits(model, ids)
    found = runner(path)
    for cuts, phase in (((), Phase.PREFILL), ((1, 16, 30), Phase.PREFILL), (range(1, 41), Phase.DECODE)):
        logits = logits_of(found, ids, cuts=cuts, phase=phase)
        assert (logits - expected).abs().max() < 2e-5 * expected.abs().max()
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_greedy_tokens_equal_transformers(pair: tuple[Path, Any]) -> None:
    path, model = pair
    prompt = tokens(2, 23)
    found = greedy(runner(path), prompt, 12)
    assert found[23:] == reference_logits(model, found[:-1]).argmax(-1).tolist()[22:]


def test_sequences_of_a_step_do_not_meet(pair: tuple[Path, Any]) -> None:
    path, model = pair
    texts = [tokens(seed, count) for seed, count in ((4, 5), (5, 40), (6, 1))]
    pages = [[3], [9, 2, 7], [0]]  # in no order
    whole = runner(path).run(step(Phase.PREFILL, [(ids, 0, p) for ids, p in zip(texts, pages, strict=True)]))
    expected = torch.cat([reference_logits(model, ids) for ids in texts])
    assert (whole - expected).abs().max() < 2e-5 * expected.abs().max()


def test_bundled_model_equals_transformers(tmp_path: Path) -> None:
    """Trained weights; the text is longer than ``index_topk``."""
    path = bundled_model("tiny-glm")
    model, ids = transformers_model(path, tmp_path), tokens(3, 100, vocab=4096)
    found = runner(path)
    expected = reference_logits(model, ids)
    logits = logits_of(found, ids, cuts=(50, 98, 99), phase=Phase.DECODE)
    assert (logits - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.parametrize(("kv", "bound"), [("bf16", 0.04), ("fp8", 0.1)])
@pytest.mark.parametrize("family", FAMILIES)
def test_published_sizes_in_bfloat16(family: str, kv: str, bound: float, tmp_path: Path) -> None:
    """Teacher-forced on the kernels, all positions chosen: root mean square of the error over that of the logits,
    and the same best token wherever the second is further behind than four times that.
    """
    changes = {"index_topk": 64} if "index_topk" in FAMILIES[family] else {}
    path = checkpoint(tmp_path, family, PUBLISHED, **changes)
    expected = reference_logits(transformers_model(path, tmp_path / "copy"), tokens(1, 41))
    found = runner(path, compute="bfloat16", cache={"kv_dtype": kv})
    logits = logits_of(found, tokens(1, 41), cuts=(20, *range(30, 41)), phase=Phase.DECODE)
    error = (logits - expected).pow(2).mean().sqrt()
    assert 1e-4 < error / expected.pow(2).mean().sqrt() < bound
    best = expected.topk(2, -1).values
    clear = best[:, 0] - best[:, 1] > 4 * error
    assert clear.float().mean() > 0.25
    assert torch.equal(logits.argmax(-1)[clear], expected.argmax(-1)[clear])


@pytest.mark.parametrize("family", ["glm_moe_dsa", "deepseek_v32"])
def test_sparse_attention_in_bfloat16_is_near(family: str, tmp_path: Path) -> None:
    """Which of nearly equal keys are chosen may differ, so the bound is wide."""
    path = checkpoint(tmp_path, family, PUBLISHED, index_topk=24)
    expected = reference_logits(transformers_model(path, tmp_path / "copy"), tokens(1, 41))
    found = logits_of(runner(path, compute="bfloat16", cache={"kv_dtype": "fp8"}), tokens(1, 41), cuts=(30,))
    assert (found - expected).norm() / expected.norm() < 0.2


def test_memory_of_the_absorbed_halves_is_counted(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "deepseek_v3", TINY)
    rows = HEADS * (TINY["qk_nope_head_dim"] + TINY["v_head_dim"])
    facts = runner(path, compute="bfloat16").facts
    assert facts.memory["derived"] == LAYERS * 2 * rows * TINY["kv_lora_rank"]


def test_kv_format_depends_on_how_columns_are_paired(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "deepseek_v3", TINY)
    before = runner(path).facts.kv_format_id
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"rope_interleave": False}))
    assert runner(path).facts.kv_format_id != before
