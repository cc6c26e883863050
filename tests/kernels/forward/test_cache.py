"""Storing into, gathering from and copying KV pages, on every implementation, byte for byte."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantkit_kernels.forward import cache
from quantkit_kernels.forward.pages import GqaLayout, IndexLayout, MlaLayout

from . import paged

pytestmark = pytest.mark.usefixtures("each_implementation")
LAYOUTS = [
    GqaLayout(16, 2, 128), GqaLayout(3, 1, 7),
    GqaLayout(5, 3, 67, "bf16"), GqaLayout(4, 1, 1), GqaLayout(7, 2,
    33), GqaLayout(2, 1, 576), MlaLayout(16), MlaLayout(13, "bf16"), IndexLayout(16), IndexLayout(5, "bf16"),
]  # fmt: skip


def random(layout: Any, tokens: int, generator: torch.Generator) -> list[Tensor]:
    """What a layout stores of each token: bf16 over many magnitudes."""
    if isinstance(layout, GqaLayout):
        shapes = [(tokens, layout.num_kv_heads, layout.head_dim)] * 2
    else:
        shapes = [(tokens, 512), (tokens, 64)] if isinstance(layout, MlaLayout) else [(tokens, 128)]
    return [
        (
            torch.randn(shape, generator=generator) * torch.exp(2 * torch.randn(shape, generator=generator))
        ).bfloat16()
        for shape in shapes
    ]


def store(layout: Any, pages: Tensor, slots: Tensor, parts: list[Tensor]) -> None:
    names = {GqaLayout: cache.store_gqa, MlaLayout: cache.store_mla, IndexLayout: cache.store_index_keys}
    names[type(layout)](pages, layout, slots, *parts)


def gather(layout: Any, pages: Tensor, table: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
    names = {GqaLayout: cache.gather_gqa, MlaLayout: cache.gather_mla, IndexLayout: cache.gather_index_keys}
    result = names[type(layout)](pages, layout, table, lengths)
    return result if isinstance(result, tuple) else (result,)


def blocks(layout: Any) -> list[int | None]:
    """Columns that share a scale, for each part; None where the part stays bf16."""
    if layout.kv_dtype == "bf16":
        return [None, None]
    return [128, None] if isinstance(layout, MlaLayout) else [getattr(layout, "head_dim", 128)] * 2


def expected(value: Tensor, block: int | None) -> np.ndarray:
    """What a stored value must read as, by a plain search for the nearest code."""
    x = value.double().numpy()
    if block is None:
        return x
    x = x.reshape(*x.shape[:-1], x.shape[-1] // block, block)
    absmax = np.abs(x).max(-1, keepdims=True).astype(np.float32)
    scale = np.where(absmax > 0, absmax / np.float32(448), np.float32(2**-23))
    quotient = (x.astype(np.float32) / scale).astype(np.float64)
    table = np.sort(paged.E4M3[:127])  # the finite magnitudes; a code's parity is its index's
    at = np.clip(np.searchsorted(table, np.abs(quotient)), 1, 126)
    low, high = table[at - 1], table[at]
    nearer = np.abs(quotient) - low, high - np.abs(quotient)
    up = (nearer[1] < nearer[0]) | ((nearer[1] == nearer[0]) & (at % 2 == 0))
    result = np.copysign(np.where(up, high, low), quotient) * scale.astype(np.float64)
    return result.reshape(value.shape)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_stored_tokens_read_as_the_nearest_code(layout: Any, tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    parts = random(layout, tokens, generator)
    num_pages = -(-tokens // layout.page_size) + 2
    pages = paged.fill(layout, num_pages, generator)
    slots = torch.randperm(num_pages * layout.page_size, generator=generator)[:tokens]
    slots[1::5] = -1
    before = pages.clone()
    store(layout, pages, slots, parts)
    read = {GqaLayout: paged.gqa_token, MlaLayout: paged.mla_token, IndexLayout: paged.index_token}[type(layout)]
    wanted = [expected(part, block) for part, block in zip(parts, blocks(layout), strict=False)]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            found = read(pages[slot // layout.page_size].numpy(), layout, slot % layout.page_size)
            for f, w in zip(found if isinstance(found, tuple) else (found,), wanted, strict=False):
                np.testing.assert_allclose(f, w[token], rtol=2**-23)
    untouched = set(range(num_pages * layout.page_size)) - set(slots.tolist())
    for slot in untouched:
        page, offset = divmod(slot, layout.page_size)
        old, new = (np.hstack(read(p[page].numpy(), layout, offset)) for p in (before, pages))
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gather_is_the_rounded_product(layout: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    lengths = [0, 1, layout.page_size, 13, 0, 37]
    pages = paged.fill(layout, 64, generator)
    table, length = paged.tables(layout, lengths, 64, generator)
    found = gather(layout, pages, table, length)
    for part in found:
        assert part.dtype == torch.bfloat16 and part.shape[:2] == (len(lengths), 37) and part.is_contiguous()
    for row, n in enumerate(lengths):
        for part, wanted in zip(found, paged.context(pages, layout, table[row], n), strict=True):
            assert torch.equal(part[row, :n], torch.from_numpy(wanted).float().bfloat16())
            assert (part[row, n:] == 0).all()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_stores_come_back(data: st.DataObject) -> None:
    """A second store of what came back changes nothing; other requests' pages keep their bytes."""
    layout = data.draw(st.sampled_from(LAYOUTS))
    lengths = data.draw(st.lists(st.integers(0, 40), min_size=0, max_size=5))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    num_pages = sum(-(-n // layout.page_size) for n in lengths) + data.draw(st.integers(1, 3))
    pages = layout.allocate(num_pages)
    table, length = paged.tables(layout, lengths, num_pages, generator)
    slots = [
        int(table[r, i // layout.page_size]) * layout.page_size + i % layout.page_size
        for r, n in enumerate(lengths)
        for i in range(n)
    ]
    parts = random(layout, len(slots), generator)
    store(layout, pages, torch.tensor(slots, dtype=torch.int64), parts)
    found = gather(layout, pages, table, length)
    for part, given_part, block in zip(found, parts, blocks(layout), strict=False):
        flat = torch.cat([part[r, :n] for r, n in enumerate(lengths)] or [given_part])
        if block is None:
            assert torch.equal(flat, given_part)
        else:
            wide = given_part.float().unflatten(-1, (-1, block))
            error = (flat.float() - given_part.float()).unflatten(-1, (-1, block)).abs()
            # half a step of the code (2^-4 of it, or of the smallest normal) and the bf16 rounding
            bound = wide.abs() * (2**-4 + 2**-8) + wide.abs().amax(-1, keepdim=True) / 448 * 2**-10
            assert (error <= bound * 1.001).all()
    unused = sorted(set(range(num_pages)) - {s // layout.page_size for s in slots})
    assert (pages[unused] == 0).all()


SHARED_SCALES = [x for x in LAYOUTS if x.kv_dtype == "fp8" and getattr(x, "head_dim", 2) > 1]


@pytest.mark.parametrize("layout", SHARED_SCALES, ids=str)
def test_what_is_not_finite_comes_back_as_nan_and_alone(layout: Any) -> None:
    parts = random(layout, 4, torch.Generator().manual_seed(2))
    clean = [part.clone() for part in parts]
    for part in parts:
        part[0].view(-1)[0], part[1].view(-1)[0], part[2].view(-1)[-1] = math.nan, math.inf, -math.inf
    for part in clean:  # absmax must come from the others
        part[0].view(-1)[0] = part[1].view(-1)[0] = part[2].view(-1)[-1] = 0
    slots, table = torch.arange(4), torch.arange(8, dtype=torch.int32)[None]
    length = torch.tensor([4], dtype=torch.int32)
    found, wanted = [], []
    for source, results in ((parts, found), (clean, wanted)):
        pages = layout.allocate(8)
        store(layout, pages, slots, source)
        results += gather(layout, pages, table, length)
    for f, w, original, block in zip(found, wanted, parts, blocks(layout), strict=False):
        bad = ~original.isfinite()[None]
        if block is not None:
            assert f[bad].isnan().all()
        assert torch.equal(f[~bad], w[~bad])


def test_zeros_denormals_and_the_largest() -> None:
    layout = IndexLayout(8)
    pages = layout.allocate(1)
    keys = torch.zeros(4, 128).bfloat16()
    keys[1] = 2.0**-133  # the smallest bf16
    keys[2] = torch.finfo(torch.bfloat16).max
    keys[3, 0], keys[3, 1:] = 448.0, 2.0**-9  # the smallest code
    cache.store_index_keys(pages, layout, torch.arange(4), keys)
    views = layout.views(pages)
    assert views.scale is not None
    assert views.scale[0, 0] == 2.0**-23 and (views.key[0, 0].float() == 0).all()
    assert (views.key[0, 1].float() == 448).all() and (views.key[0, 2].float() == 448).all()
    assert views.key[0, 3].view(torch.uint8).tolist() == [0x7E] + [1] * 127
    table = torch.zeros(1, 1, dtype=torch.int32)
    found = cache.gather_index_keys(pages, layout, table, torch.tensor([4], dtype=torch.int32))
    assert torch.equal(found[0, 3], keys[3]) and torch.equal(found[0, 2], keys[2])


def test_strided_and_offset_arguments() -> None:
    layout = GqaLayout(4, 2, 33)
    generator = torch.Generator().manual_seed(3)
    key, value = random(layout, 6, generator)
    slots = torch.randperm(24, generator=generator)[:6]
    plain = layout.allocate(6)
    cache.store_gqa(plain, layout, slots, key, value)
    interleaved = torch.zeros(6, 3 * layout.page_bytes, dtype=torch.uint8)
    pages = interleaved[:, layout.page_bytes : 2 * layout.page_bytes]
    wide = torch.zeros(33, 6, 2, 3, dtype=torch.bfloat16)
    strided = wide.permute(1, 2, 0, 3)[..., 1]  # last dimension not contiguous
    strided.copy_(key)
    twice = torch.stack([slots, slots], 1)[:, 0]
    cache.store_gqa(pages, layout, twice, strided, value.transpose(0, 1).contiguous().transpose(0, 1))
    assert torch.equal(pages, plain)
    assert (interleaved[:, : layout.page_bytes] == 0).all() and (
        interleaved[:, 2 * layout.page_bytes :] == 0
    ).all()
    table = torch.arange(12, dtype=torch.int32).view(2, 6)[:1].expand(1, 6)
    length = torch.tensor([9, 21, 9], dtype=torch.int32)[1::2]
    for a, b in zip(
        cache.gather_gqa(pages, layout, table, length), cache.gather_gqa(plain, layout, table, length), strict=True
    ):
        assert torch.equal(a, b)


def test_copy_pages() -> None:
    generator = torch.Generator().manual_seed(4)
    pages = torch.randint(0, 256, (9, 77), generator=generator, dtype=torch.uint8)[:, 3:70]
    before = pages.clone()
    cache.copy_pages(pages, torch.tensor([1, 1, 8]), torch.tensor([0, 7, 3]))
    after = before.clone()
    after[0], after[7], after[3] = before[1], before[1], before[8]
    assert torch.equal(pages, after)
    cache.copy_pages(pages, torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))
    assert torch.equal(pages, after)


def test_same_bytes_in_one_and_two_threads() -> None:
    layout = MlaLayout(16)
    parts = random(layout, 300, torch.Generator().manual_seed(6))
    slots, table = torch.arange(300), torch.arange(19, dtype=torch.int32)[None]
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            pages = layout.allocate(19)
            store(layout, pages, slots, parts)
            results.append((pages, *gather(layout, pages, table, torch.tensor([300], dtype=torch.int32))))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


LAYOUT = GqaLayout(4, 2, 8)


def call_store(**change: Any) -> None:
    given_values: dict[str, Any] = {
        "pages": LAYOUT.allocate(3), "layout": LAYOUT, "slots": torch.tensor([0, 11]),
        "key": torch.zeros(2, 2, 8).bfloat16(), "value": torch.zeros(2, 2, 8).bfloat16(),
    }  # fmt: skip
    cache.store_gqa(**{**given_values, **change})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pages", torch.zeros(3, 5, dtype=torch.uint8)),
        ("pages", LAYOUT.allocate(3).float()),
        ("slots", torch.tensor([0, 12])),
        ("slots", torch.tensor([0, -2])),
        ("slots", torch.tensor([5, 5])),
        ("slots", torch.tensor([2**62, 0])),
        ("slots", torch.tensor([0, 1], dtype=torch.int32)),
        ("slots", torch.tensor([0])),
        ("key", torch.zeros(2, 2, 8)),
        ("key", torch.zeros(2, 2, 7).bfloat16()),
        ("value", torch.zeros(3, 2, 8).bfloat16()),
        ("value", np.zeros((2, 2, 8))),
    ],
)
def test_wrong_arguments_of_store_name_themselves(name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=name):
        call_store(**{name: value})


def test_pages_that_are_the_key() -> None:
    pages = LAYOUT.allocate(3)
    with pytest.raises(ValueError, match=r"pages.*key"):
        call_store(pages=pages, key=pages.view(-1)[:64].view(torch.bfloat16).view(2, 2, 8))


@pytest.mark.parametrize(
    ("name", "table", "lengths"),
    [
        ("block_table", [[0, 3]], [8]),
        ("block_table", [[0, -1]], [5]),
        ("block_table", [[2**31 - 1, 0]], [1]),
        ("lengths", [[0, 1]], [9]),
        ("lengths", [[0, 1]], [-1]),
        ("lengths", [[0, 1]], [1, 1]),
    ],
)
def test_wrong_tables_name_themselves(name: str, table: list[list[int]], lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=name):
        cache.gather_gqa(
            LAYOUT.allocate(3),
            LAYOUT,
            torch.tensor(table, dtype=torch.int32),
            torch.tensor(lengths, dtype=torch.int32),
        )


@pytest.mark.parametrize(
    ("name", "source", "target"),
    [
        ("source", [3], [0]), ("target", [0], [-1]), ("target", [0, 1], [2, 2]), ("target", [0, 1], [1, 2]),
        ("target", [0, 1], [2]),
    ],
)  # fmt: skip
def test_wrong_copies_name_themselves(name: str, source: list[int], target: list[int]) -> None:
    with pytest.raises(ValueError, match=name):
        cache.copy_pages(LAYOUT.allocate(3), torch.tensor(source), torch.tensor(target))
