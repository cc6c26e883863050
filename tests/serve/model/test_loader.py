"""Weights of artifacts and checkpoints: what is shared, what phases take, what is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import quantkit
from quantkit.errors import ArtifactError, QuantkitError, SourceError, UnsupportedError, UsageError
from quantkit_kernels.forward.weights import Fp8Weight, Int4Weight
from quantkit_serve.config import CacheConfig, EngineConfig, ModelConfig
from quantkit_serve.model.loader import LoadedWeights, open_weights
from quantkit_serve.model.runner import open_runner
from quantkit_serve.model.weights import PlainWeight
from quantkit_serve.phase import Phase
from tests.builders import bf16, write_checkpoint
from tests.serve.model.oracle import logits_of, reference_logits, runner, step, tokens, transformers_model
from tests.serve.model.tiny import CASES, checkpoint, tensors

UP = "model.layers.1.mlp.experts.2.up_proj"
QUERY = "model.layers.1.self_attn.q_proj"

ONES = bf16(np.ones(4, np.float32))


def converted(source: Path, out: Path, **options: Any) -> quantkit.Artifact:
    with quantkit.open(source) as found:
        return quantkit.convert(quantkit.plan(found, method="rtn", **options), out, checkpoint=found, jobs=1)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("loader") / "checkpoint", CASES["qwen3_moe"])


@pytest.fixture(scope="module")
def artifact(source: Path) -> Path:
    return converted(source, source.parent / "artifact").path


def weights(path: Path, weight_set: Any) -> LoadedWeights:
    return open_weights(path, weight_set).weights


def test_dual_shares_what_both_views_hold(artifact: Path) -> None:
    found = weights(artifact, "dual")
    query, up = found.linear(QUERY), found.linear(UP)
    assert query.prefill is query.decode and isinstance(query.prefill.weight, Fp8Weight)
    assert isinstance(up.prefill.weight, Fp8Weight) and isinstance(up.decode.weight, Int4Weight)
    assert isinstance(found.linear("lm_head").decode.weight, PlainWeight)
    memory = open_runner(artifact, EngineConfig(ModelConfig(weights="dual"))).facts.memory
    stored = {name: nbytes(artifact / name) for name in ("prefill", "decode")}
    experts = 2 * 4 * 3 * 256 * 128
    assert memory["prefill"] == experts + experts // (128 * 128) * 4
    assert memory["decode"] == experts // 2 + experts // 32 * 2
    for name in ("prefill", "decode"):  # scales are float32 in memory and BF16 on disk; weight_shape is not loaded
        assert abs(memory["shared"] + memory[name] - stored[name]) < 4096


def nbytes(view: Path) -> int:
    from quantkit.checkpoint import open_checkpoint

    with open_checkpoint(view) as found:
        return found.nbytes


def test_weights_are_mapped(artifact: Path) -> None:
    """The codes are the file's bytes, not a copy: a change of the file shows."""
    codes = weights(artifact, "fp8").linear(UP).prefill.weight
    assert isinstance(codes, Fp8Weight)
    view = quantkit.Artifact.open(artifact).prefill
    info = view[UP].stored.weight
    file = np.memmap(artifact / "prefill" / info.file, np.uint8, mode="r+")
    before = int(file[info.offset])
    try:
        file[info.offset] = before ^ 1
        assert int(codes.codes.view(torch.uint8)[0, 0]) == before ^ 1
    finally:
        file[info.offset] = before


@pytest.mark.parametrize("options", [{}, {"linears": "all"}, {"rest": "bf16"}, {"group_size": 128}])
def test_each_phase_computes_with_its_view(source: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    """Prefill equals transformers on the FP8 view, decode steps behind it equal transformers on the INT4 view."""
    made = converted(source, tmp_path / "artifact", **options)
    ids = tokens(1, 12)
    found = runner(made.path, weights="dual")
    prefill, decode = (
        transformers_model(view.tensors, tmp_path / view.name) for view in (made.prefill, made.decode)
    )
    for phase, model in ((Phase.PREFILL, prefill), (Phase.DECODE, decode)):
        expected = reference_logits(model, ids)
        ours = logits_of(found, ids, phase=phase)
        assert (ours - expected).abs().max() < 1e-4 * expected.abs().max()
    for weight_set, phase in (("fp8", Phase.PREFILL), ("int4", Phase.DECODE)):
        single = runner(made.path, weights=weight_set)
        assert torch.equal(logits_of(single, ids), logits_of(found, ids, phase=phase))
    assert (reference_logits(prefill, ids) - reference_logits(decode, ids)).abs().max() > 1e-2  # they do differ


def test_kernels_compute_with_every_decode_view(source: Path, tmp_path: Path) -> None:
    made = converted(source, tmp_path / "artifact", linears="all")
    ids = tokens(2, 20)
    for weight_set, phase in (("dual", Phase.DECODE), ("dual", Phase.PREFILL)):
        exact = logits_of(runner(made.path, weights=weight_set), ids, phase=phase)
        ours = logits_of(runner(made.path, weights=weight_set, compute="bfloat16"), ids, phase=phase)
        assert (ours - exact).pow(2).mean().sqrt() < 0.02 * exact.pow(2).mean().sqrt()


def test_plain_checkpoints_have_one_weight_set(source: Path, artifact: Path) -> None:
    memory = open_runner(source, EngineConfig(ModelConfig(weights="fp8"))).facts.memory
    assert memory["prefill"] == memory["decode"] == 0 < memory["shared"]
    assert open_runner(artifact / "decode", EngineConfig(ModelConfig(weights="int4"))).facts.memory["shared"] > 0
    for path, weight_set, accepted in (
        (source, "dual", "fp8"),
        (source, "int4", "fp8"),
        (artifact / "decode", "fp8", "int4"),
    ):
        with pytest.raises(UsageError, match=f"no weight set.*{accepted}"):
            open_weights(path, weight_set)


def test_views_of_other_pairs_are_refused(source: Path, artifact: Path, tmp_path: Path) -> None:
    other = converted(source, tmp_path / "other", group_size=64).path
    mixed = tmp_path / "mixed"
    shutil.copytree(artifact, mixed)
    shutil.rmtree(mixed / "decode")
    shutil.copytree(other / "decode", mixed / "decode")
    with pytest.raises(ArtifactError, match="belongs to the pair"):
        open_weights(mixed, "dual")
    open_weights(mixed, "fp8")


def test_a_reference_has_no_weights(source: Path, tmp_path: Path) -> None:
    made = converted(source, tmp_path / "artifact", place="reference").path
    with pytest.raises(ArtifactError, match="reference"):
        open_weights(made, "dual")
    assert open_runner(made, EngineConfig(ModelConfig(weights="int4"))).facts.memory["shared"] > 0


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop("model.layers.1.mlp.gate.weight"), "layers.1.mlp.gate.*needs a tensor"),
        (lambda t: t.pop("model.norm.weight"), "model.norm.*needs a tensor"),
        (lambda t: [t.pop(n) for n in list(t) if ".experts.3.up_proj" in n], "experts.3.up_proj.*needs a tensor"),
        (lambda t: t.update({"model.layers.0.extra.weight": ONES}), "without a place in the model: 1,.*extra"),
        (lambda t: t.update({"model.layers.0.mlp.gate.bias": ONES}), "a bias"),
    ],
)  # fmt: skip
def test_a_tensor_too_few_or_too_many(tmp_path: Path, change: Any, message: str) -> None:
    found, config = tensors(CASES["qwen3_moe"])
    change(found)
    path = write_checkpoint(tmp_path / "checkpoint", found, config)
    with pytest.raises(SourceError, match=message):
        open_runner(path, EngineConfig(ModelConfig(weights="fp8")))


@pytest.mark.parametrize(
    "family, settings, message",
    [
        ("qwen3_moe", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 64}, "sliding_window is 64"),
        ("mixtral", {"sliding_window": 4096}, "sliding_window is 4096"),
        ("qwen3_moe", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ("qwen3_moe", {"vocab_size": None}, "vocab_size is None"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("glm_moe_dsa", {"mlp_layer_types": ["dense"]}, "mlp_layer_types names 1 layers"),
        ("deepseek_v3", {"n_group": 3}, "n_group is 3, of 8 experts"),
        ("deepseek_v3", {"n_group": 8}, "n_group is 8, of 8 experts"),
        ("deepseek_v3", {"n_group": 0}, "n_group is 0"),
        ("deepseek_v3", {"topk_group": 5}, "topk_group is 5"),
        ("deepseek_v3", {"topk_group": "2"}, "topk_group is '2'"),
        ("deepseek_v3", {"topk_group": 1}, "num_experts_per_tok is 3, of 2 eligible experts"),
        ("qwen3_moe", {"num_experts_per_tok": 99}, "num_experts_per_tok is 99, of 4 eligible experts"),
        ("qwen3_moe", {"num_experts_per_tok": None}, "num_experts_per_tok is None"),
    ],
)
def test_settings_that_nothing_computes(
    tmp_path: Path, family: str, settings: dict[str, Any], message: str
) -> None:
    path = checkpoint(tmp_path / "checkpoint", CASES[family])
    config = json.loads((path / "config.json").read_text()) | settings
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(QuantkitError, match=message):
        open_runner(path, EngineConfig(ModelConfig(weights="fp8")))


def test_of_one_group_all_are_kept(tmp_path: Path) -> None:
    """Whatever topk_group says."""
    logits = []
    for kept in (4, 1):
        path = checkpoint(tmp_path / str(kept), CASES["deepseek_v3"])
        config = json.loads((path / "config.json").read_text()) | {"n_group": 1, "topk_group": kept}
        (path / "config.json").write_text(json.dumps(config))
        found = runner(path, compute="bfloat16", cache={"kv_dtype": "fp8"})
        logits.append(found.run(step(Phase.PREFILL, [(tokens(1, 5), 0, [0])])))
    assert torch.equal(*logits)


def test_families_that_are_not_known(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "checkpoint", CASES["qwen3_moe"])
    config = json.loads((path / "config.json").read_text()) | {"model_type": "other_moe"}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="can't be served"):
        open_runner(path, EngineConfig(ModelConfig(weights="fp8")))


@pytest.mark.parametrize(
    "model, cache, message",
    [
        ({"compute": "bfloat16"}, {"kv_dtype": "f32"}, "need float32 compute"),
        ({"compute": "float32"}, {"kv_dtype": "fp8"}, "does not round"),
        ({"compute": "float32", "fp8_activations": "dynamic128"}, {"kv_dtype": "f32"}, "rounds no activations"),
    ],
)
def test_settings_that_exclude_each_other(
    source: Path, model: dict[str, Any], cache: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        open_runner(source, EngineConfig(ModelConfig(weights="fp8", **model), CacheConfig(**cache)))


def test_facts(source: Path) -> None:
    def facts(**cache: Any) -> Any:
        return open_runner(source, EngineConfig(ModelConfig(weights="fp8"), CacheConfig(**cache)), "a name").facts

    one = facts(page_size=16)
    assert (one.name, one.vocab_size, one.max_model_len) == ("a name", 64, 512)
    assert one.eos_token_ids == {0, 7}
    assert one.page_bytes == 2 * (2 * 2 * 16 * (32 + 4))  # layers, keys and values, heads, tokens
    assert one.kv_format_id == facts(page_size=16).kv_format_id
    others = {facts(page_size=size, kv_dtype=kind).kv_format_id for size in (16, 32) for kind in ("fp8", "bf16")}
    assert len(others) == 4 and one.kv_format_id in others


def test_pages_are_allocated_once_and_first(source: Path) -> None:
    found = open_runner(source, EngineConfig(ModelConfig(weights="fp8"), CacheConfig(page_size=16)))
    batch = step(Phase.PREFILL, [(tokens(1, 3), 0, [1])])
    with pytest.raises(ValueError, match="allocate comes before"):
        found.run(batch)
    shared = torch.zeros((4, found.facts.page_bytes), dtype=torch.uint8)
    with pytest.raises(ValueError, match="memory must be uint8"):
        found.allocate(4, shared[:, 1:])
    with pytest.raises(ValueError, match="holds 4 pages"):
        found.allocate(5, shared)
    found.allocate(4, shared)
    with pytest.raises(ValueError, match="already"):
        found.allocate(4)
    found.run(batch)
    assert shared[1].any() and not shared[[0, 2, 3]].any()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"cu_tokens": [0, 3, 3]}, "cu_tokens must rise"),
        ({"cu_tokens": [0, 2, 4]}, "cu_tokens must rise"),
        ({"positions": [0, 1, 5]}, "positions must be the last ones"),
        ({"positions": [-1, 0, 5]}, "positions must be the last ones"),
        ({"lengths": [3, 6]}, "positions must be the last ones"),
        ({"lengths": [2, 33], "positions": [0, 1, 32]}, "beyond the rows of block_table"),
        ({"token_ids": [1, 2, 64]}, "token_ids must lie in"),
        ({"token_ids": [1, -2, 3]}, "token_ids must lie in"),
        ({"logit_rows": [0, 3]}, "logit_rows must be tokens"),
        ({"block_table": [[1, -1], [-1, 2]]}, r"block_table\[1\] has no page"),
        ({"block_table": [[1, -1], [9, 2]]}, "slots must lie in"),
        ({"block_table": [[1, -1], [1, 2]]}, "slots names a slot twice"),
    ],
)
def test_steps_that_do_not_fit_together(source: Path, change: dict[str, Any], message: str) -> None:
    """Nothing is written: the pool stays empty."""
    found = open_runner(source, EngineConfig(ModelConfig(weights="fp8"), CacheConfig(page_size=16)))
    memory = torch.zeros((4, found.facts.page_bytes), dtype=torch.uint8)
    found.allocate(4, memory)
    good = step(Phase.DECODE, [([1, 2], 0, [1, -1]), ([3], 1, [3, 2])])
    arrays = {name: np.array(value, getattr(good, name).dtype) for name, value in change.items()}
    with pytest.raises(ValueError, match=message):
        found.run(dataclasses.replace(good, **arrays))
    assert not memory.any()
    found.run(good)
    assert memory[[1, 3]].any(1).all() and not memory[[0, 2]].any()
