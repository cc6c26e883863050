"""Bytes per token, per GPU and capacity at full size, against figures worked out by others or by hand."""

from __future__ import annotations

from functools import cache

import pytest

from quantkit.errors import UsageError
from quantkit.models.classify import find_family
from quantkit.models.config import TextShape, text_shape
from quantkit.models.kv import kv_bytes_per_token
from quantkit.models.role import Role
from quantkit.plan.capacity import (
    GPU_MEMORY,
    Gpu,
    Weight,
    both_views,
    bytes_per_gpu,
    bytes_per_token,
    capacity,
    choose_gpu,
    speedup_bound,
)
from quantkit.units import GIB, MIB
from tests.facts import facts, tensors

ROUTED = (Role.ROUTED_EXPERT,)
ALL_MLP = (*ROUTED, Role.SHARED_EXPERT, Role.DENSE_MLP)
ALL = (*ALL_MLP, Role.ATTENTION)


@cache
def view(model: str, quantized: tuple[Role, ...] = (), group_size: int = 32) -> tuple[list[Weight], TextShape]:
    """Weights of the published checkpoint, some roles as INT4 with BF16 scales; MTP layers as stored."""
    config, stored = facts(model)["config"], tensors(model)
    classifier = find_family(config, stored)
    found: list[Weight] = []
    for name, tensor in stored.items():
        role = classifier.role_of(name)
        leaf = role.module.rpartition(".")[2]
        if (
            role.role in quantized
            and not role.is_mtp
            and leaf.endswith(("_proj", "_with_mqa", "w1", "w2", "w3"))
            and leaf != "kv_b_proj"
        ):
            if role.part == "weight":
                rows, columns = tensor.shape
                packed, scales = rows * columns // 2, rows * (columns // group_size) * 2
                found += [
                    Weight(role.role, leaf, "weight_packed", (rows, columns // 8), packed, differs=True),
                    Weight(role.role, leaf, "weight_scale", (rows, columns // group_size), scales, differs=True),
                    Weight(role.role, leaf, "weight_shape", (2,), 16, differs=True),
                ]
            continue
        found.append(Weight(role.role, leaf, role.part, tensor.shape, tensor.nbytes, role.is_mtp))
    return found, text_shape(config)


def bound(model: str, quantized: tuple[Role, ...], group_size: int = 32) -> float:
    before, shape = view(model)
    after, _ = view(model, quantized, group_size)
    return speedup_bound(bytes_per_token(before, shape), bytes_per_token(after, shape))


def test_bytes_per_token_of_glm_52() -> None:
    weights, shape = view("glm-5.2-fp8")
    read = bytes_per_token(weights, shape)
    fp8 = 1 + 4 / 128**2  # e4m3 with a float32 scale per block
    expert = 3 * 2048 * 6144
    assert read[Role.ROUTED_EXPERT] == int(75 * 8 * expert * fp8)
    assert read[Role.SHARED_EXPERT] == int(75 * 1 * expert * fp8)
    assert read[Role.DENSE_MLP] == int(3 * 3 * 12288 * 6144 * fp8)
    assert read[Role.ROUTER] == 75 * (256 * 6144 * 2 + 256 * 4)
    assert read[Role.EMBEDDING] == 6144 * 2  # one row
    assert read[Role.LM_HEAD] == 154_880 * 6144 * 2
    assert Role.MTP not in read
    assert sum(read.values()) == 41_383_447_104


@pytest.mark.parametrize(
    ("quantized", "expected"),
    [(ROUTED, 1.31506), (ALL_MLP, 1.38258), (ALL, 1.66876)],
    ids=["routed", "mlp", "all"],
)
def test_speed_up_bound_of_glm_52(quantized: tuple[Role, ...], expected: float) -> None:
    assert bound("glm-5.2-fp8", quantized) == pytest.approx(expected, abs=5e-6)


def test_speed_up_bound_by_hand() -> None:
    # 22.65 GB of 41.38 GB shrink from 8 + 0.002 to 4.5 bits a weight
    experts = 75 * 8 * 3 * 2048 * 6144
    rest = 41_383_447_104 - experts * (1 + 4 / 128**2)
    assert bound("glm-5.2-fp8", ROUTED) == pytest.approx(41_383_447_104 / (rest + experts * 4.5 / 8), rel=1e-9)


@pytest.mark.parametrize(
    ("model", "expected"),
    [("deepseek-v3-r1", 1.3114), ("qwen3-30b-a3b-fp8", 1.3082), ("minimax-m2.7-fp8", 1.37914)],
)
def test_speed_up_bounds_of_others(model: str, expected: float) -> None:
    assert bound(model, ROUTED) == pytest.approx(expected, abs=5e-4)


def test_larger_groups_read_less() -> None:
    bounds = [bound("glm-5.2-fp8", ROUTED, g) for g in (32, 64, 128)]
    assert bounds == sorted(bounds)
    assert bounds[2] < 41_383_447_104 / (41_383_447_104 - 22_654_771_200 / 2)  # 4 bits would be the end of it


@pytest.mark.parametrize(
    ("quantized", "include_mtp", "gib", "tolerance"),
    [
        ((), False, 88.18, 5e-5),  # the FP8 figure that others publish
        (ROUTED, False, 51.25, 1e-4),
        # With the multi-token-prediction layer others state 89.37 and 52.44 to 52.59 and do not say whether
        # eh_proj is divided; here every GPU holds it.
        ((), True, 89.37, 2e-3),
        (ROUTED, True, 52.52, 2e-3),
    ],
)
def test_glm_52_on_eight_gpus(
    quantized: tuple[Role, ...], include_mtp: bool, gib: float, tolerance: float
) -> None:
    weights, shape = view("glm-5.2-fp8", quantized)
    per_gpu = bytes_per_gpu(weights, shape, 8, include_mtp=include_mtp)
    assert per_gpu / GIB == pytest.approx(gib, rel=tolerance)


@pytest.mark.parametrize(("quantized", "total_gib"), [((), 705.44), (ROUTED, 410.0)])
def test_glm_52_sum_over_eight_gpus(quantized: tuple[Role, ...], total_gib: float) -> None:
    weights, shape = view("glm-5.2-fp8", quantized)
    assert 8 * bytes_per_gpu(weights, shape, 8) / GIB == pytest.approx(total_gib, rel=1e-4)


def test_kimi_k26_on_eight_gpus() -> None:
    weights, shape = view("kimi-k2.5-k2.6-int4")
    assert bytes_per_gpu(weights, shape, 8) / GIB == pytest.approx(71.06, rel=5e-5)


def test_one_gpu_holds_everything_but_mtp() -> None:
    weights, shape = view("glm-5.2-fp8")
    everything = sum(t.nbytes for t in tensors("glm-5.2-fp8").values())
    assert bytes_per_gpu(weights, shape, 1, include_mtp=True) == everything == 755_617_140_416
    mtp = sum(t.nbytes for n, t in tensors("glm-5.2-fp8").items() if ".layers.78." in n)
    assert bytes_per_gpu(weights, shape, 1) == everything - mtp


def test_kv_projections_are_repeated_beyond_the_kv_heads() -> None:
    shape = text_shape(facts("qwen3-30b-a3b-fp8")["config"])  # 4 KV heads
    k = [Weight(Role.ATTENTION, "k_proj", "weight", (512, 2048), 1 << 20)]
    q = [Weight(Role.ATTENTION, "q_proj", "weight", (4096, 2048), 8 << 20)]
    assert [bytes_per_gpu(k, shape, tp) >> 10 for tp in (1, 2, 4, 8)] == [1024, 512, 256, 256]
    assert bytes_per_gpu(q, shape, 8) == 1 << 20


def test_a_gpu_that_serves_both_phases_holds_the_rest_once() -> None:
    prefill, shape = view("glm-5.2-fp8")
    decode, _ = view("glm-5.2-fp8", ROUTED)
    both = bytes_per_gpu(both_views(prefill, decode), shape, 8)
    int4 = 75 * 256 * 3 * 2048 * 6144 * 4.5 / 8 / 8
    assert both == pytest.approx(bytes_per_gpu(prefill, shape, 8) + int4, abs=1)


def test_tied_embedding_is_read_as_lm_head() -> None:
    shape = text_shape({"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1})
    read = bytes_per_token([Weight(Role.EMBEDDING, "embed_tokens", "weight", (100, 8), 1600)], shape)
    assert read == {Role.EMBEDDING: 16, Role.LM_HEAD: 1600}


def test_capacity_of_kimi_k26_as_reported() -> None:
    """686,000 tokens of BF16 and 1,370,000 of FP8 in 44.9 GiB beside 71.06 GiB of weights on H200."""
    weights, shape = view("kimi-k2.5-k2.6-int4")
    kv = kv_bytes_per_token(shape)
    gpu = Gpu("h200", GPU_MEMORY["h200"])
    per_gpu = bytes_per_gpu(weights, shape, 8)
    bf16 = capacity(per_gpu, kv, kv.plain_bf16, gpu, 8, 0.826)
    fp8 = capacity(per_gpu, kv, kv.plain_fp8, gpu, 8, 0.826)
    assert bf16.tokens == pytest.approx(686_000, rel=0.003)
    assert fp8.tokens == pytest.approx(1_370_000, rel=0.005)
    assert (bf16.kv_bytes, fp8.kv_bytes) == (70_272, 35_136)  # MLA: every GPU holds the whole latent


def test_capacity_of_glm_52_as_reported() -> None:
    """1.18 million tokens at 61,464 bytes beside INT4 weights with the MTP layer, SGLang's fraction of 0.85."""
    weights, shape = view("glm-5.2-fp8", ROUTED)
    kv = kv_bytes_per_token(shape)
    assert kv.engine_fp8 == 61_464
    per_gpu = bytes_per_gpu(weights, shape, 8, include_mtp=True)
    found = capacity(per_gpu, kv, kv.engine_fp8, Gpu("h200", GPU_MEMORY["h200"]), 8, 0.855)
    assert found.tokens == pytest.approx(1_180_000, rel=0.005)


def test_what_does_not_fit_says_how_much_it_lacks() -> None:
    weights, shape = view("glm-5.2-fp8")
    kv = kv_bytes_per_token(shape)
    found = capacity(bytes_per_gpu(weights, shape, 8), kv, kv.fp8, Gpu("h100", GPU_MEMORY["h100"]), 8, 0.9)
    assert found.tokens == 0
    assert found.problem == "does not fit: needs 88.18 GiB per GPU, has 71.68 GiB"


def test_gqa_capacity_grows_with_gpus_until_heads_run_out() -> None:
    shape = text_shape(facts("qwen3-30b-a3b-fp8")["config"])
    kv = kv_bytes_per_token(shape)
    tokens = [capacity(0, kv, kv.fp8, Gpu("x", GIB), n, 1.0).tokens for n in (1, 2, 4, 8)]
    assert tokens == [GIB // 50_688, GIB // 25_344, GIB // 12_672, GIB // 12_672]


def test_gpu_table_in_bytes() -> None:
    assert GPU_MEMORY["h200"] == 143_771 * MIB
    assert GPU_MEMORY["h200"] / GIB == pytest.approx(140.4, abs=0.01)
    assert GPU_MEMORY["h100"] == 81_559 * MIB
    assert GPU_MEMORY["b200"] == 183_359 * MIB


@pytest.mark.parametrize(
    ("name", "memory", "expected"),
    [
        ("H200", None, Gpu("h200", 150_754_820_096)),
        ("nvidia-h100", None, Gpu("h100", 85_520_809_984)),
        (None, "140GiB", Gpu("140.00 GiB", 150_323_855_360)),
        (None, "140GB", Gpu("130.39 GiB", 140_000_000_000)),
        (None, None, None),
    ],
)
def test_choose_gpu(name: str | None, memory: str | None, expected: Gpu | None) -> None:
    assert choose_gpu(name, memory) == expected


def test_choose_gpu_refuses() -> None:
    with pytest.raises(UsageError, match="h100, h200, b200"):
        choose_gpu("h300", None)
    with pytest.raises(UsageError, match="exclude"):
        choose_gpu("h200", "140GiB")
    with pytest.raises(UsageError, match="140GiB"):
        choose_gpu(None, "140G")


@pytest.mark.parametrize(("gpus", "fraction"), [(0, 0.9), (8, 0.0), (8, 1.1), (8, float("nan"))])
def test_capacity_refuses(gpus: int, fraction: float) -> None:
    kv = kv_bytes_per_token(facts("glm-5.2-fp8")["config"])
    with pytest.raises(UsageError):
        capacity(1, kv, kv.fp8, Gpu("x", GIB), gpus, fraction)
