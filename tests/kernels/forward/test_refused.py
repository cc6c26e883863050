"""Tensors that no implementation can take: refused by name, before native code could read what is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit_kernels.forward import cache, choice, gqa, index, mla, tags
from quantkit_kernels.forward.experts import MOST_CHOICES, moe_fp8, moe_int4
from quantkit_kernels.forward.linear import fp8_linear, int4_linear
from quantkit_kernels.forward.pages import GqaLayout, IndexLayout, MlaLayout
from quantkit_kernels.forward.weights import Experts, Fp8Weight
from quantkit_kernels.registry import ENV_BACKEND

from .made_up import activations, fp8, int4

pytestmark = pytest.mark.usefixtures("each_implementation")
GQA, MLA, INDEX = GqaLayout(4, 2, 16), MlaLayout(4), IndexLayout(4)
TABLE = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
LENGTHS, STARTS, ROWS = (torch.tensor(n, dtype=torch.int32) for n in ([5, 8], [0, 1, 2], [0, 1]))
QUERY, KEY = torch.ones(2, 4, 16).bfloat16(), torch.ones(2, 2, 16).bfloat16()
LATENT, ROPE = torch.ones(2, 3, 512).bfloat16(), torch.ones(2, 3, 64).bfloat16()


def operation(name: str, replaced: dict[str, Any]) -> object:
    """A call with good arguments, some of them replaced."""
    layer: Any = Experts(*([int4(seed, 128, 128, 32)] for seed in (1, 2, 3)))
    calls: dict[str, tuple[Callable[..., object], dict[str, Any]]] = {
        "int4_linear": (int4_linear, {"x": activations(1, 3, 64), "weight": int4(1, 8, 64, 32)}),
        "fp8_linear": (fp8_linear, {"x": activations(1, 3, 64), "weight": fp8(1, 8, 64)}),
        "moe_int4": (
            moe_int4,
            {
                "hidden": activations(1, 2, 128),
                "topk_ids": torch.zeros(2, 1, dtype=torch.int64),
                "topk_weights": torch.ones(2, 1),
                "experts": layer,
            },
        ),
        "gqa_decode": (
            gqa.gqa_decode,
            {
                "query": QUERY, "pages": GQA.allocate(4), "layout": GQA, "block_table": TABLE, "lengths": LENGTHS,
                "scale": 0.1,
            },
        ),
        "gqa_prefill": (
            gqa.gqa_prefill,
            {
                "query": QUERY, "pages": GQA.allocate(4), "layout": GQA, "block_table": TABLE,
                "cu_queries": STARTS, "lengths": LENGTHS, "scale": 0.1, "fresh_key": KEY, "fresh_value": KEY,
            },
        ),
        "mla_decode": (
            mla.mla_decode,
            {
                "query_latent": LATENT, "query_rope": ROPE, "pages": MLA.allocate(4), "layout": MLA,
                "block_table": TABLE, "lengths": LENGTHS, "scale": 0.1, "indices": TABLE,
            },
        ),
        "mla_prefill": (
            mla.mla_prefill,
            {
                "query_latent": LATENT, "query_rope": ROPE, "pages": MLA.allocate(4), "layout": MLA,
                "block_table": TABLE, "cu_queries": STARTS, "lengths": LENGTHS, "scale": 0.1, "indices": TABLE,
            },
        ),
        "index_scores": (
            index.index_scores,
            {
                "query": torch.ones(2, 3, 128).bfloat16(), "head_weights": torch.ones(2, 3),
                "pages": INDEX.allocate(4), "layout": INDEX, "block_table": TABLE, "rows": ROWS,
                "lengths": LENGTHS,
            },
        ),
        "index_topk": (index.index_topk, {"scores": torch.ones(2, 8), "lengths": LENGTHS, "k": 2}),
        "store_gqa": (
            cache.store_gqa,
            {"pages": GQA.allocate(4), "layout": GQA, "slots": torch.tensor([3, 7]), "key": KEY, "value": KEY},
        ),
        "gather_gqa": (
            cache.gather_gqa,
            {"pages": GQA.allocate(4), "layout": GQA, "block_table": TABLE, "lengths": LENGTHS},
        ),
        "copy_pages": (
            cache.copy_pages,
            {"pages": GQA.allocate(4), "source": torch.tensor([0]), "target": torch.tensor([1])},
        ),
    }  # fmt: skip
    function, arguments = calls[name]
    return function(**arguments | replaced)


FLOATS = [
    ("int4_linear", "x", activations(1, 3, 64)),
    ("moe_int4", "topk_weights", torch.ones(2, 1)),
    ("gqa_decode", "query", QUERY),
    ("gqa_prefill", "fresh_key", KEY),
    ("mla_decode", "query_rope", ROPE),
    ("index_scores", "head_weights", torch.ones(2, 3)),
    ("index_topk", "scores", torch.ones(2, 8)),
    ("store_gqa", "value", KEY),
]


@pytest.mark.parametrize(("name", "argument", "value"), FLOATS, ids=[f"{name}-{of}" for name, of, _ in FLOATS])
def test_a_lazy_negation_is_not_taken_for_its_numbers(name: str, argument: str, value: Tensor) -> None:
    with pytest.raises(ValueError, match=f"{argument} is a lazy negation"):
        operation(name, {argument: torch._neg_view(value)})


@pytest.mark.parametrize(("name", "argument", "value"), FLOATS, ids=[f"{name}-{of}" for name, of, _ in FLOATS])
def test_a_gradient_is_not_dropped_in_silence(name: str, argument: str, value: Tensor) -> None:
    wanting = {argument: value.clone().requires_grad_()}
    with torch.enable_grad(), pytest.raises(ValueError, match=f"{argument} requires grad"):
        operation(name, wanting)
    for quiet in (torch.no_grad(), torch.inference_mode()):
        with quiet:
            operation(name, wanting)


@pytest.mark.parametrize(("name", "argument", "value"), FLOATS, ids=[f"{name}-{of}" for name, of, _ in FLOATS])
def test_a_tensor_without_memory_is_refused(name: str, argument: str, value: Tensor) -> None:
    with pytest.raises(ValueError, match=f"{argument} is on meta"):
        operation(name, {argument: value.to("meta")})
    released = value.clone()
    released.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=f"{argument} has no memory"):
        operation(name, {argument: released})


def test_all_on_meta_is_refused() -> None:
    there = [t.to("meta") for t in (TABLE, TABLE, TABLE.to(torch.uint64), TABLE[0].to(torch.uint64), LENGTHS)]
    with pytest.raises(ValueError, match="block_table is on meta"):
        tags.check_page_tags(*there)
    with pytest.raises(ValueError, match="pages is on meta"):
        operation("gather_gqa", {"pages": GQA.allocate(4, "meta")})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused() -> None:
    with pytest.raises(TypeError, match="x must be a dense tensor, got a nested tensor"):
        operation("int4_linear", {"x": torch.nested.nested_tensor([activations(1, 3, 64)])})


def test_an_output_must_not_overlap_what_says_where_to_read() -> None:
    """It would be overwritten while pages are looked up in it."""
    room = torch.zeros(4096, dtype=torch.int32)
    for name, argument, numbers in (
        ("gqa_decode", "block_table", TABLE), ("gqa_decode", "lengths", LENGTHS),
        ("gqa_prefill", "block_table", TABLE), ("gqa_prefill", "cu_queries", STARTS),
        ("gqa_prefill", "lengths", LENGTHS),
        ("mla_decode", "block_table", TABLE), ("mla_decode", "lengths", LENGTHS), ("mla_decode", "indices", TABLE),
        ("mla_prefill", "block_table", TABLE), ("mla_prefill", "cu_queries", STARTS),
        ("mla_prefill", "lengths", LENGTHS), ("mla_prefill", "indices", TABLE),
    ):  # fmt: skip
        shape = QUERY.shape if name.startswith("gqa") else LATENT.shape
        there = room[: numbers.numel()].view(numbers.shape).copy_(numbers)
        out = room.view(torch.bfloat16)[: shape.numel()].view(shape)
        with pytest.raises(ValueError, match=f"out shares memory with {argument}"):
            operation(name, {argument: there, "out": out})


def test_pages_must_not_hold_the_numbers_that_address_them() -> None:
    for name, argument, layout, numbers in (
        ("store_gqa", "slots", GQA, [3, 7]), ("copy_pages", "source", GQA, [0]),
        ("copy_pages", "target", GQA, [1]),
    ):  # fmt: skip
        pages = layout.allocate(4)
        inside = pages.view(-1)[: 8 * len(numbers)].view(torch.int64).copy_(torch.tensor(numbers))
        with pytest.raises(ValueError, match=f"pages shares memory with {argument}"):
            operation(name, {"pages": pages, argument: inside})


def test_pages_that_overlap_are_not_copied() -> None:
    memory = torch.arange(256, dtype=torch.uint8)
    for pages in (memory.as_strided((4, 64), (8, 1)), memory[:64].expand(4, 64)):
        with pytest.raises(ValueError, match="pages must have rows that do not overlap"):
            operation("copy_pages", {"pages": pages})


@pytest.mark.parametrize("name", ["gqa_decode", "gqa_prefill", "mla_decode", "mla_prefill"])
def test_a_scale_must_be_a_finite_number(name: str) -> None:
    for scale in (float("nan"), float("inf"), -float("inf"), 1e39, 10**400):
        with pytest.raises(ValueError, match="scale must be a finite float32"):
            operation(name, {"scale": scale})
    for wrong in ("0.5", None, 1j, torch.ones(2)):
        with pytest.raises(TypeError, match="scale must be"):
            operation(name, {"scale": wrong})
    for good in (0, 1, True, torch.tensor(0.5)):
        operation(name, {"scale": good})


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("gqa_decode", MLA), ("mla_decode", GQA), ("index_scores", MLA), ("store_gqa", INDEX), ("gather_gqa", None)],
)
def test_a_layout_of_another_kind_is_refused(name: str, wrong: Any) -> None:
    with pytest.raises(TypeError, match="layout must be a"):
        operation(name, {"layout": wrong})


def test_sizes_of_layouts_are_integers() -> None:
    for size in (4.0, "4", True, None):
        with pytest.raises(TypeError, match=r"layout\.page_size must be an integer"):
            GqaLayout(size, 2, 16)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"layout\.head_dim must lie in"):
        GqaLayout(4, 2, 2**70)


def test_blocks_are_integers_that_native_code_can_hold() -> None:
    codes, scale = torch.zeros(8, 64).to(torch.float8_e4m3fn), torch.ones(1, 1)
    for block in ((2**64, 2**64), (2**63, 128), (128, 2**64), (0, 128), (128, -128)):
        with pytest.raises(ValueError, match=r"weight\.block must lie in"):
            Fp8Weight(codes, scale, block)
    for wrong in (128, None, (128,), (128, 128, 128), (128.0, 128), ("a", "b")):
        with pytest.raises(TypeError, match=r"weight\.block must be"):
            Fp8Weight(codes, scale, wrong)  # type: ignore[arg-type]
    assert fp8_linear(activations(1, 2, 64), Fp8Weight(codes, scale, (2**31 - 1, 2**31 - 1))).shape == (2, 8)


def test_experts_hold_weights_and_keep_them() -> None:
    with pytest.raises(TypeError, match=r"experts\.gate must hold Int4Weight or Fp8Weight, got Tensor"):
        Experts([torch.ones(2, 2)], [torch.ones(2, 2)], [torch.ones(2, 2)])  # type: ignore[type-var]
    gates = [int4(1, 128, 128, 32)]
    layer = Experts(gates, [int4(2, 128, 128, 32)], [int4(3, 128, 128, 32)])
    gates.append(int4(4, 64, 64, 32))
    assert layer.num_experts == 1 and len(layer.gate) == 1
    operation("moe_int4", {"experts": layer})


def test_no_more_choices_than_native_code_can_count() -> None:
    many = MOST_CHOICES + 1
    ids, weights = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    for count in (many, 2**40):
        with pytest.raises(ValueError, match="topk_ids must have at most 65536 columns"):
            operation("moe_int4", {"topk_ids": ids.expand(2, count), "topk_weights": weights.expand(2, count)})


@pytest.mark.parametrize("tokens", [1, 20])
def test_experts_without_inner_columns_give_zeros(tokens: int) -> None:
    """An empty sum; memory that nobody wrote before."""
    wide = Fp8Weight(torch.zeros(0, 128).to(torch.float8_e4m3fn), torch.zeros(0, 1))
    narrow = Fp8Weight(torch.zeros(128, 0).to(torch.float8_e4m3fn), torch.zeros(1, 0))
    out = torch.full((tokens, 128), 7.0).bfloat16()
    ids = torch.zeros(tokens, 1, dtype=torch.int32)
    moe_fp8(activations(1, tokens, 128), ids, torch.ones(tokens, 1), Experts([wide], [wide], [narrow]), out=out)
    assert not out.any()


def test_counts_of_page_tags_may_be_strided() -> None:
    pages, wanted = torch.tensor([[0, 1]] * 2, dtype=torch.int32), torch.tensor([[5, 6]] * 2, dtype=torch.uint64)
    counts = torch.tensor([2, 0, 3, 0], dtype=torch.int32)[::2]
    assert tags.check_page_tags(pages, pages, wanted, wanted[0], counts).tolist() == [True, False]


def test_a_backend_that_does_not_exist_is_refused_on_a_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_BACKEND, "bogus")
    with pytest.raises(ValueError, match="'bogus' is not a backend"):
        choice._backend.__wrapped__("cuda")
