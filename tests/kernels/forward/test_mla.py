"""Paged multi-head latent attention on every implementation, against plain float64 over the same bytes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quantkit_kernels.forward.cache import store_mla
from quantkit_kernels.forward.mla import mla_decode, mla_prefill
from quantkit_kernels.forward.pages import MlaLayout

from . import paged

pytestmark = pytest.mark.usefixtures("each_implementation")
LIMIT, RMS = 2**-7, 2**-8  # stated in mla.py, in units of the largest value seen
SCALE = 192**-0.5


def queries(tokens: int, heads: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    latent = torch.randn(tokens, heads, 512, generator=generator) * 0.5
    return latent.bfloat16(), torch.randn(tokens, heads, 64, generator=generator).bfloat16()


def decode_case(layout: MlaLayout, heads: int, lengths: list[int], seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    num_pages = sum(-(-n // layout.page_size) for n in lengths) + 1
    pages = paged.fill(layout, num_pages, generator)
    table, length = paged.tables(layout, lengths, num_pages, generator)
    return *queries(len(lengths), heads, generator), pages, table, length


def attention(query_latent: Tensor, query_rope: Tensor, latent: np.ndarray, rope: np.ndarray) -> np.ndarray:
    query = np.concatenate([paged.float64(query_latent), paged.float64(query_rope)], -1)
    key = np.concatenate([latent, rope], -1)
    return paged.attention(query, key[:, None], latent[:, None], SCALE)


def check_row(found: Tensor, query_latent: Tensor, query_rope: Tensor, latent: Any, rope: Any) -> None:
    wanted = attention(query_latent, query_rope, latent, rope)
    paged.assert_close(found, wanted, np.abs(latent).max(initial=0), LIMIT, RMS)
    assert len(latent) or (found == 0).all()


@pytest.mark.parametrize("kv_dtype", ["fp8", "bf16"])
@pytest.mark.parametrize("heads", [1, 2, 4, 5, 8, 13, 16, 33, 64])
def test_decode(heads: int, kv_dtype: str) -> None:
    layout = MlaLayout(64 if heads % 2 else 13, kv_dtype)
    query_latent, query_rope, pages, table, length = decode_case(layout, heads, [0, 1, 67, 130], seed=heads)
    found = mla_decode(query_latent, query_rope, pages, layout, table, length, scale=SCALE)
    for row, n in enumerate(length.tolist()):
        check_row(found[row], query_latent[row], query_rope[row], *paged.context(pages, layout, table[row], n))


def test_decode_of_a_long_context() -> None:
    layout = MlaLayout(64)
    query_latent, query_rope, pages, table, length = decode_case(layout, 3, [1100, 576])
    found = mla_decode(query_latent, query_rope, pages, layout, table, length, scale=SCALE)
    for row, n in enumerate(length.tolist()):
        check_row(found[row], query_latent[row], query_rope[row], *paged.context(pages, layout, table[row], n))


@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize("chosen", [0, 1, 33, 600])
def test_sparse_decode(chosen: int, heads: int) -> None:
    layout = MlaLayout(16)
    query_latent, query_rope, pages, table, length = decode_case(layout, heads, [0, 5, 700], seed=chosen)
    generator = torch.Generator().manual_seed(chosen)
    indices = torch.full((3, chosen), -1, dtype=torch.int32)
    for row, n in enumerate(length.tolist()):
        some = torch.randperm(n, generator=generator)[:chosen].sort().values
        places = torch.randperm(chosen, generator=generator)[: len(some)].sort().values  # -1 anywhere
        indices[row, places] = some.int()
    found = mla_decode(query_latent, query_rope, pages, layout, table, length, scale=SCALE, indices=indices)
    for row, n in enumerate(length.tolist()):
        latent, rope = paged.context(pages, layout, table[row], n)
        used = indices[row][indices[row] >= 0].numpy()
        check_row(found[row], query_latent[row], query_rope[row], latent[used], rope[used])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_query_that_chooses_nothing_gets_zeros_beside_rows_of_nan(threads: int) -> None:
    layout = MlaLayout(64, "bf16")
    pages = layout.allocate(10)
    rope = torch.ones(640, 64).bfloat16()
    store_mla(pages, layout, torch.arange(640), torch.full((640, 512), math.nan).bfloat16(), rope)
    query = torch.ones(4, 2, 512).bfloat16(), torch.ones(4, 2, 64).bfloat16()
    table, length = torch.arange(10).int().repeat(4, 1), torch.tensor([640] * 4, dtype=torch.int32)
    indices = torch.arange(600).int().repeat(4, 1)
    indices[3] = -1
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = mla_decode(*query, pages, layout, table, length, scale=SCALE, indices=indices)
        assert (found[3] == 0).all() and found[:3].isnan().all()
    finally:
        torch.set_num_threads(before)


def prefill_case(
    layout: MlaLayout, heads: int, chunks: list[tuple[int, int]], seed: int = 0
) -> tuple[Tensor, ...]:
    *_, pages, table, length = decode_case(layout, heads, [h + q for h, q in chunks], seed)
    starts = torch.tensor(np.cumsum([0, *(q for _, q in chunks)]), dtype=torch.int32)
    generator = torch.Generator().manual_seed(seed + 1)
    tokens = int(starts[-1])
    fresh = torch.randn(tokens, 512, generator=generator).bfloat16()
    return *queries(tokens, heads, generator), pages, table, starts, length, fresh, fresh[:, :64].neg()


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("is_fresh", [False, True], ids=["stored", "fresh"])
@pytest.mark.parametrize(("heads", "kv_dtype"), [(1, "fp8"), (5, "bf16"), (8, "fp8"), (33, "fp8")])
def test_prefill(heads: int, kv_dtype: str, is_fresh: bool, is_sparse: bool) -> None:
    layout = MlaLayout(16, kv_dtype)
    case = prefill_case(layout, heads, [(0, 7), (70, 33), (5, 0), (130, 1)], seed=heads)
    query_latent, query_rope, pages, table, starts, length, fresh_latent, fresh_rope = case
    extra = {"fresh_latent": fresh_latent, "fresh_rope": fresh_rope} if is_fresh else {}
    indices = torch.full((len(query_latent), 20), -1, dtype=torch.int32)
    wanted: list[tuple[np.ndarray, np.ndarray]] = []
    for row, n in enumerate(length.tolist()):
        first, last = int(starts[row]), int(starts[row + 1])
        history = n - (last - first)
        latent, rope = paged.context(pages, layout, table[row], history if is_fresh else n)
        if is_fresh:
            latent = np.concatenate([latent, paged.float64(fresh_latent[first:last])])
            rope = np.concatenate([rope, paged.float64(fresh_rope[first:last])])
        for t in range(first, last):
            seen = history + t - first + 1
            some = np.arange(seen)
            if is_sparse:
                some = np.sort(np.random.default_rng(t).permutation(seen)[:19])
                indices[t, 1 : 1 + len(some)] = torch.from_numpy(some).int()
            wanted.append((latent[some], rope[some]))
    found = mla_prefill(
        query_latent, query_rope, pages, layout, table, starts, length,
        scale=SCALE, indices=indices if is_sparse else None, **extra,
    )  # fmt: skip
    for t, (latent, rope) in enumerate(wanted):
        check_row(found[t], query_latent[t], query_rope[t], latent, rope)


@pytest.mark.parametrize("heads", [3, 8])
def test_alone_in_a_batch_and_in_two_threads(heads: int) -> None:
    layout = MlaLayout(64)
    query_latent, query_rope, pages, table, length = decode_case(layout, heads, [1100, 3, 0, 512, 513])
    indices = torch.arange(0, 600, 7, dtype=torch.int32)[None] % length.clamp(min=1)[:, None]
    indices[2] = -1
    threads = torch.get_num_threads()
    try:
        for extra in (None, indices):
            torch.set_num_threads(1)
            whole = mla_decode(query_latent, query_rope, pages, layout, table, length, scale=SCALE, indices=extra)
            for row in range(5):
                some = slice(row, row + 1)
                alone = mla_decode(
                    query_latent[some], query_rope[some], pages, layout, table[some], length[some],
                    scale=SCALE, indices=None if extra is None else extra[some],
                )  # fmt: skip
                assert torch.equal(alone[0], whole[row])
            torch.set_num_threads(2)
            again = mla_decode(query_latent, query_rope, pages, layout, table, length, scale=SCALE, indices=extra)
            assert torch.equal(again, whole)
    finally:
        torch.set_num_threads(threads)


def test_prefill_in_chunks_and_in_two_threads(each_implementation: str) -> None:
    layout = MlaLayout(16)
    query_latent, query_rope, pages, table, starts, length, *_ = prefill_case(layout, 5, [(3, 20), (0, 70)])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = mla_prefill(query_latent, query_rope, pages, layout, table, starts, length, scale=SCALE)
        torch.set_num_threads(2)
        again = mla_prefill(query_latent, query_rope, pages, layout, table, starts, length, scale=SCALE)
        assert torch.equal(again, whole)
        if each_implementation != "torch":  # where a prompt is cut must not show
            begin = torch.tensor([0, 37], dtype=torch.int32)
            rest = mla_prefill(
                query_latent[53:], query_rope[53:], pages, layout, table[1:], begin, length[1:], scale=SCALE
            )
            assert torch.equal(rest, whole[53:])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("heads", [2, 8])
def test_nan_reaches_those_that_see_it(heads: int) -> None:
    layout = MlaLayout(16)
    query_latent, query_rope, pages, table, length = decode_case(layout, heads, [40, 40, 40, 40])
    clean = mla_decode(query_latent, query_rope, pages, layout, table, length, scale=SCALE)
    views = layout.views(pages)
    assert views.scale is not None
    views.latent.view(torch.uint8)[table[0, 1].item(), 3, 500] = 0x7F
    views.rope[table[1, 0].item(), 1, 63] = math.nan
    views.scale[table[2, 2].item(), 7, 2] = math.nan
    query_rope[3, 1, 5] = math.nan
    found = mla_decode(query_latent, query_rope, pages, layout, table, length, scale=SCALE)
    assert found[:3].isnan().all() and found[3, 1].isnan().all()
    keep = [h for h in range(heads) if h != 1]
    assert torch.equal(found[3, keep], clean[3, keep])


def test_a_later_nan_does_not_reach_earlier_queries(each_implementation: str) -> None:
    layout = MlaLayout(16)
    query_latent, query_rope, pages, table, starts, length, *_ = prefill_case(layout, 2, [(10, 30)])
    clean = mla_prefill(query_latent, query_rope, pages, layout, table, starts, length, scale=SCALE)
    layout.views(pages).latent.view(torch.uint8)[table[0, 1].item(), 14, 9] = 0x7F  # position 30: query 20
    found = mla_prefill(query_latent, query_rope, pages, layout, table, starts, length, scale=SCALE)
    assert found[20:].isnan().all()
    paged.assert_same(each_implementation, found[:20], clean[:20])


def test_strides_offsets_and_out() -> None:
    layout = MlaLayout(5)
    query_latent, query_rope, pages, table, length = decode_case(layout, 4, [12, 40])
    plain = mla_decode(query_latent, query_rope, pages, layout, table, length, scale=SCALE)
    joint = torch.cat([query_latent, query_rope], -1).transpose(0, 1).contiguous().transpose(0, 1)
    out = torch.full((3, 4, 512), 7.0).bfloat16()
    found = mla_decode(joint[..., :512], joint[..., 512:], pages, layout, table, length, scale=SCALE, out=out[1:])
    assert found.data_ptr() == out[1:].data_ptr() and torch.equal(found, plain) and (out[0] == 7).all()


def test_empty_batch() -> None:
    layout = MlaLayout(4)
    none, table = torch.zeros(0, dtype=torch.int32), torch.zeros(0, 0, dtype=torch.int32)
    latent, rope = torch.zeros(0, 2, 512).bfloat16(), torch.zeros(0, 2, 64).bfloat16()
    assert mla_decode(latent, rope, layout.allocate(0), layout, table, none, scale=1.0).shape == (0, 2, 512)


LAYOUT = MlaLayout(4)


def arguments() -> dict[str, Any]:
    return {
        "query_latent": torch.zeros(2, 3, 512).bfloat16(), "query_rope": torch.zeros(2, 3, 64).bfloat16(),
        "pages": LAYOUT.allocate(3), "layout": LAYOUT,
        "block_table": torch.tensor([[0, 1], [2, 0]], dtype=torch.int32),
        "lengths": torch.tensor([8, 3], dtype=torch.int32), "scale": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("query_latent", torch.zeros(2, 3, 511).bfloat16()), ("query_latent", torch.zeros(1, 3, 512).bfloat16()),
        ("query_rope", torch.zeros(2, 4, 64).bfloat16()), ("query_rope", torch.zeros(2, 3, 64)),
        ("pages", torch.zeros(3, 656, dtype=torch.uint8)),
        ("block_table", torch.tensor([[0, 3], [2, 0]], dtype=torch.int32)),
        ("lengths", torch.tensor([9, 3], dtype=torch.int32)),
        ("indices", torch.tensor([[8], [0]], dtype=torch.int32)),
        ("indices", torch.tensor([[-2], [0]], dtype=torch.int32)),
        ("indices", torch.tensor([[0], [3]], dtype=torch.int32)), ("indices", torch.tensor([[0], [1]])),
        ("indices", torch.tensor([[0]], dtype=torch.int32)), ("out", torch.zeros(2, 3, 64).bfloat16()),
    ],
)  # fmt: skip
def test_wrong_arguments_name_themselves(name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=name):
        mla_decode(**{**arguments(), name: value})


def test_wrong_arguments_of_prefill_name_themselves() -> None:
    given_values = {**arguments(), "cu_queries": torch.tensor([0, 1, 2], dtype=torch.int32)}
    for name, value in (
        ("indices", torch.tensor([[7], [3]], dtype=torch.int32)),
        ("fresh_rope", torch.zeros(2, 64).bfloat16()),
        ("cu_queries", torch.tensor([0, 1, 1], dtype=torch.int32)),
    ):
        with pytest.raises(ValueError, match=name):
            mla_prefill(**{**given_values, name: value})
    decode = arguments()
    with pytest.raises(ValueError, match="out shares memory with query_latent"):
        mla_decode(**decode, out=decode["query_latent"])
