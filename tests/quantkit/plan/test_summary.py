"""What ``quantkit plan`` shows: every section for real sources, exact sizes at full size, odd sources."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quantkit.checkpoint import Checkpoint, open_checkpoint
from quantkit.checkpoint.weights import find_weights
from quantkit.cli import show_plan
from quantkit.errors import EnvironmentProblem, UsageError
from quantkit.models.role import Role
from quantkit.plan import build_plan
from quantkit.plan.probe import Rates
from quantkit.plan.summary import summarise, view_weights
from quantkit.recipe import default_recipe, load_recipe
from quantkit.units import GIB
from tests.builders import write_moe
from tests.facts import facts, tensors
from tests.recipes import data_free_recipe

RATES = Rates(1e8, 1e9, 1e9, "cpu")


@pytest.fixture
def tiny() -> Iterator[Checkpoint]:
    with open_checkpoint("tiny-glm") as checkpoint:
        yield checkpoint


def summary_of(checkpoint: Any, recipe: str = "tiny-glm", options: dict[str, Any] | None = None, **kw: Any) -> Any:
    plan = build_plan(checkpoint, load_recipe(recipe).with_options(**(options or {})))
    found = summarise(plan, checkpoint, rates=RATES, **kw)
    json.dumps(found, allow_nan=False)  # plain and finite
    return found


@cache
def full_size(model: str, recipe: str, **options: Any) -> Any:
    """The summary for a published checkpoint at full size, headers only."""
    stored, config = tensors(model), facts(model)["config"]
    one = SimpleNamespace(name="model.safetensors", nbytes=sum(t.nbytes for t in stored.values()), etag=None)
    weights = find_weights(stored, config)
    checkpoint = SimpleNamespace(
        label=model, kind="local", revision=None, fingerprint="0" * 64, config=config, tensors=stored,
        files={one.name: one}, side_files=(), warnings=(), weights=lambda: weights, local_path=lambda name: None,
    )  # fmt: skip
    return summary_of(checkpoint, recipe, dict(options), gpu="h200", gpus=8)


def test_glm_52_at_full_size() -> None:
    found = full_size("glm-5.2-fp8", "glm-5.2")
    assert found["output"]["prefill"]["tensor_bytes"] == 755_617_140_416
    # 438.35 GB, and 16 bytes of weight_shape for each of 57,600 matrices
    assert found["output"]["decode"]["tensor_bytes"] == 438_350_810_816 + 16 * 57_600
    reads = found["decode_reads"]
    assert (reads["fp8_bytes"], reads["int4_bytes"]) == (41_383_447_104, 31_468_874_304)
    assert reads["speedup_bound"] == pytest.approx(1.31506, abs=5e-6)
    assert reads["speedup_bound_shown"] == "1.31"
    assert reads["not_read"] == ["mtp"]
    assert found["kv_cache"]["fp8_bytes"] == 53_940
    assert found["kv_cache"]["engine_fp8_bytes"] == 61_464
    rows = {row["weights"]: row for row in found["capacity"]["rows"]}
    assert rows["prefill"]["weight_bytes_per_gpu"] / GIB == pytest.approx(88.18, rel=5e-5)
    assert rows["decode"]["weight_bytes_per_gpu"] / GIB == pytest.approx(51.25, rel=1e-4)
    usable = int(150_754_820_096 * 0.9)
    assert found["capacity"]["usable_bytes_per_gpu"] == usable
    assert rows["decode"]["tokens"]["fp8"] == (usable - rows["decode"]["weight_bytes_per_gpu"]) // 53_940
    assert rows["both"]["problem"] == "does not fit: needs 135.64 GiB per GPU, has 126.36 GiB"
    assert rows["both"]["tokens"] == {"bf16": 0, "fp8": 0}
    levels = {tp: found["engines"]["prefill"]["vllm"][tp]["level"] for tp in ("1", "2", "4", "8", "16")}
    assert set(levels.values()) == {"ok"}
    assert found["engines"]["decode"]["vllm"]["16"]["level"] != "no"
    assert found["engines"]["decode"]["sglang"]["16"]["level"] == "warn"
    assert found["engines"]["decode"]["transformers"]["1"]["level"] == "ok"
    assert "not enough disk space" in (found["disk"]["problem"] or "not enough disk space")


def test_wider_sets_of_linears_raise_the_bound(tiny: Checkpoint) -> None:
    reads = {
        x: summary_of(tiny, options={"method": "mse", "linears": x})["decode_reads"]
        for x in ("routed", "all-mlp", "all")
    }
    fp8 = reads["routed"]["fp8_bytes"]
    matrices = 3 * 128 * 256
    saved = [5 * 4 * matrices, 5 * matrices + 3 * 512 * 256]  # 4 of 16 experts; one shared expert, one dense layer
    saved.append(6 * (128 * 256 + 8 * 48 * 128 + 144 * 256 + 256 * 8 * 32))  # q_a, q_b, kv_a, o; never kv_b
    for extra, found in enumerate(reads.values(), start=1):
        assert found["fp8_bytes"] == fp8
        assert fp8 - found["int4_bytes"] == pytest.approx(sum(saved[:extra]) * (1 - 4.5 / 8), rel=2e-3)


def test_qwen3_says_where_it_does_not_load() -> None:
    engines = full_size("qwen3-30b-a3b-fp8", "qwen3-30b-a3b")["engines"]
    assert engines["prefill"]["vllm"]["4"]["level"] == "no"
    reasons = engines["prefill"]["vllm"]["4"]["reasons"]
    assert [r["message"] for r in reasons] == ["expert width 768 / TP 4 is not a multiple of the FP8 block 128"]
    assert engines["decode"]["vllm"]["4"]["level"] == "warn"  # INT4 g32 can be cut where FP8 can't
    assert engines["decode"]["sglang"]["8"]["level"] == "no"


def test_sections_and_sizes_of_a_real_source(tiny: Checkpoint) -> None:
    found = summary_of(tiny)
    assert {
        "plan_id", "source", "fates", "sizes", "output", "memory", "disk", "time", "decode_reads", "kv_cache",
        "capacity", "engines", "unknown", "warnings",
    } <= set(found)  # fmt: skip
    assert found["capacity"] is None
    assert found["unknown"] == {}
    on_disk = sum(f.nbytes for f in tiny.files.values())
    assert found["output"]["prefill"]["weight_file_bytes"] == on_disk == found["sizes"]["source"]["file_bytes"]
    assert found["output"]["decode"]["origin"] == "derived"
    assert found["memory"]["peak_bytes"] > 20 << 20


def test_views_account_for_every_byte(tiny: Checkpoint) -> None:
    plan = build_plan(tiny, load_recipe("tiny-glm"))
    for view, size in (("prefill", plan.sizes.prefill), ("decode", plan.sizes.decode)):
        weights = view_weights(plan, tiny, view)
        assert sum(w.nbytes for w in weights) == size.tensor_bytes
        for role in Role:
            assert sum(w.nbytes for w in weights if w.role is role) == size.role_bytes(role)
    decode = view_weights(plan, tiny, "decode")
    assert {w.part for w in decode if w.differs} == {"weight_packed", "weight_scale", "weight_shape"}
    assert sum(w.nbytes for w in decode if w.differs) == 5 * 16 * 3 * (128 * 256 * 9 // 16 + 16)


def test_bf16_rest_exists_in_the_decode_view_only(tiny: Checkpoint) -> None:
    plan = build_plan(tiny, load_recipe("tiny-glm").with_options(rest="bf16"))
    differs = {w.leaf for w in view_weights(plan, tiny, "decode") if w.differs}
    assert {"q_b_proj", "gate_proj", "wk"} <= differs
    assert not {"norm", "lm_head", "weights_proj", "gate"} & differs


@pytest.mark.parametrize(
    "family", ["glm_moe_dsa", "qwen3_moe", "minimax_m2", "mixtral", "deepseek_v3", "glm4_moe"]
)
def test_every_family(family: str, tmp_path: Path) -> None:
    with open_checkpoint(write_moe(tmp_path / "m", family)) as checkpoint:
        plan = build_plan(checkpoint, default_recipe())
        found = summarise(plan, checkpoint, rates=RATES, gpu="h100", gpus=1)
        assert found["unknown"] == {}
        assert found["decode_reads"]["speedup_bound"] > 1
        assert found["decode_reads"]["fp8"]["routed_expert"] > found["decode_reads"]["int4"]["routed_expert"]
        assert found["capacity"]["rows"][1]["tokens"]["fp8"] > 0


def test_derived_fp8_is_shared_by_both_views(tmp_path: Path) -> None:
    with open_checkpoint(write_moe(tmp_path / "m", "glm_moe_dsa", storage="bf16")) as checkpoint:
        plan = build_plan(checkpoint, default_recipe().with_options(make_fp8=True))
        assert {w.role for w in view_weights(plan, checkpoint, "decode") if w.differs} == {Role.ROUTED_EXPERT}


def test_native_int4_differs_in_the_experts(tmp_path: Path) -> None:
    with open_checkpoint(write_moe(tmp_path / "m", "kimi_k25")) as checkpoint:
        plan = build_plan(checkpoint, default_recipe().with_options(make_fp8=True))
        decode = view_weights(plan, checkpoint, "decode")
        assert Role.ROUTED_EXPERT in {w.role for w in decode if w.differs}
        assert all(w.differs for w in decode if w.part == "weight_packed")
        found = summarise(plan, checkpoint, rates=RATES)
        assert found["output"]["decode"]["origin"] == "publisher"
        assert found["disk"]["placement"] == "copy"


def test_a_config_without_numbers_leaves_sections_out(tmp_path: Path) -> None:
    folder = write_moe(tmp_path / "m", "qwen3_moe")
    config = json.loads((folder / "config.json").read_text())
    del config["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config))
    with open_checkpoint(folder) as checkpoint:
        found = summarise(build_plan(checkpoint, data_free_recipe()), checkpoint, rates=RATES, gpu="h200")
    assert set(found["unknown"]) == {"decode_reads", "kv_cache", "capacity", "engines"}
    assert "hidden_size" in found["unknown"]["kv_cache"]
    assert found["kv_cache"] is found["engines"] is None
    assert found["output"]["decode"]["tensor_bytes"] > 0


def test_what_calibration_reads_and_keeps(tiny: Checkpoint, tmp_path: Path) -> None:
    found = summary_of(tiny, options={"method": "gptq", "samples": 10, "length": 64, "calibration": "a.txt"})
    assert found["calibration"] == {
        "data": "a.txt", "samples": 10, "length": 64, "seed": 0, "min_tokens": 512, "route_all": False,
        "down_inputs": "quantized", "propagate": "quantized", "percdamp": 0.01, "tokens": 640,
        "tokens_per_expert": 640 * 4 / 16, "hidden_state_bytes": 640 * 256 * 4,
    }  # fmt: skip
    assert "calibration" in found["time"]["excludes"]
    shown = [block for block in show_plan.plan(found) if isinstance(block, str)]
    assert any("10 samples of 64 tokens, a.txt, 160 tokens per expert" in line for line in shown)
    assert any("without calibration" in line for line in shown)
    free = summary_of(tiny, options={"method": "mse"})
    assert "calibration" not in free and "calibration" not in free["recipe"]
    assert "calibration" not in free["time"]["excludes"]
    folder = write_moe(tmp_path / "m", "qwen3_moe")
    config = json.loads((folder / "config.json").read_text())
    del config["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config))
    with open_checkpoint(folder) as checkpoint:
        plan = build_plan(checkpoint, default_recipe().with_options(method="gptq"))
        assert "hidden_size" in summarise(plan, checkpoint, rates=RATES)["unknown"]["calibration"]


def test_rates_are_measured_for_a_calibrated_method_too(tiny: Checkpoint) -> None:
    plan = build_plan(tiny, load_recipe("tiny-glm").with_options(method="gptq"))
    assert 0 < summarise(plan, tiny)["time"]["seconds"] < 600


def test_bad_options(tiny: Checkpoint) -> None:
    for options in (
        {"gpu": "h300"},
        {"gpu": "h200", "gpu_memory": "1GB"},
        {"gpu": "h200", "gpus": 0},
        {"jobs": 0},
    ):
        with pytest.raises(UsageError):
            summary_of(tiny, **options)
    with pytest.raises(EnvironmentProblem):
        summary_of(tiny, max_memory=1 << 20)


def test_rates_are_measured_when_none_are_given(tiny: Checkpoint) -> None:
    found = summarise(build_plan(tiny, load_recipe("tiny-glm")), tiny)
    assert 0 < found["time"]["seconds"] < 600
