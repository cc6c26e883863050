"""Whole models with latent attention against transformers: float32 on FP8 weights; bfloat16 on the kernels."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import quantkit
from quantkit.data import bundled_model
from quantkit_serve.model.runner import ModelRunner
from quantkit_serve.phase import Phase
from tests.builders import Raw, bf16, f32, fp8_block, moe, write_checkpoint, write_moe
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


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers(family: str, tmp_path: Path) -> None:
    path = checkpoint(tmp_path, family, TINY)
    model, prompt = transformers_model(path, tmp_path / "copy"), tokens(2, 23)
    found = greedy(runner(path), prompt, 12)
    assert found[23:] == reference_logits(model, found[:-1]).argmax(-1).tolist()[22:]


def test_native_int4_in_text_config_equals_transformers(tmp_path: Path) -> None:
    """Kimi K2.5: the language model is a part of the checkpoint, under a prefix, with INT4 experts."""
    path = write_moe(tmp_path / "model", "kimi_k25", layers=LAYERS, seed=3)
    model, ids = transformers_model(path, tmp_path / "copy"), tokens(1, 41)
    logits = logits_of(runner(path, weights="int4"), ids, cuts=(1, 16, 30))
    expected = reference_logits(model, ids)
    assert (logits - expected).abs().max() < 2e-5 * expected.abs().max()


def test_each_phase_of_an_artifact_has_its_weights(tmp_path: Path) -> None:
    """All linears of the decode view in INT4 but kv_b_proj, as ever: both views have it, it is absorbed once."""
    path, ids = checkpoint(tmp_path / "source", "glm_moe_dsa", TINY), tokens(1, 41)
    plan = quantkit.plan(path, method="rtn", linears="all", group_size=32)
    artifact = quantkit.convert(plan, tmp_path / "artifact", jobs=1)
    dual = runner(artifact.path, weights="dual")
    logits = [logits_of(dual, ids, phase=phase) for phase in (Phase.PREFILL, Phase.DECODE)]
    for found, weights in zip(logits, ("fp8", "int4"), strict=True):
        assert torch.equal(found, logits_of(runner(artifact.path, weights=weights), ids))
    assert not torch.equal(*logits)
    once = LAYERS * HEADS * (32 + 32) * 128
    assert dual.facts.memory["derived"] == 4 * once
    assert runner(artifact.path, weights="dual", compute="bfloat16").facts.memory["derived"] == 2 * once


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


def test_kv_format_depends_on_how_columns_are_paired(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "deepseek_v3", TINY)
    before = runner(path).facts.kv_format_id
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"rope_interleave": False}))
    assert runner(path).facts.kv_format_id != before
