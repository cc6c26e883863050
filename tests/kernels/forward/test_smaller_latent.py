"""Layouts that use the first columns of a latent's record only, on every implementation."""

from __future__ import annotations

import pytest
import torch

from quantkit_kernels.forward.cache import gather_mla, store_mla
from quantkit_kernels.forward.mla import mla_decode, mla_prefill
from quantkit_kernels.forward.pages import MlaLayout

from . import paged
from .test_mla import SCALE, check_row, decode_case

pytestmark = pytest.mark.usefixtures("each_implementation")


@pytest.mark.parametrize("kv_dtype", ["fp8", "bf16"])
@pytest.mark.parametrize("columns, rotary", [(128, 16), (256, 32), (384, 64), (512, 48)])
def test_a_smaller_latent_is_the_first_columns_of_a_record(columns: int, rotary: int, kv_dtype: str) -> None:
    """What the others hold does not matter: here they are other numbers."""
    whole, layout = MlaLayout(13, kv_dtype), MlaLayout(13, kv_dtype, columns, rotary)
    query_latent, query_rope, pages, table, length = decode_case(whole, 5, [0, 1, 67, 130], seed=columns)
    query = query_latent[..., :columns], query_rope[..., :rotary]
    found = mla_decode(*query, pages, layout, table, length, scale=SCALE)
    starts = torch.tensor([0, 0, 1, 2, 3], dtype=torch.int32)
    chunk = [part[1:] for part in query]
    prefilled = mla_prefill(*chunk, pages, layout, table, starts, length, scale=SCALE)
    assert layout.page_bytes == whole.page_bytes and found.shape == (4, 5, columns)
    for row, n in enumerate(length.tolist()):
        latent, rope = paged.context(pages, whole, table[row], n)
        part = latent[:, :columns], rope[:, :rotary]
        check_row(found[row], query[0][row], query[1][row], *part)
        if row:
            check_row(prefilled[row - 1], query[0][row], query[1][row], *part)


@pytest.mark.parametrize("kv_dtype", ["fp8", "bf16"])
def test_storing_leaves_the_rest_of_a_record_alone(kv_dtype: str) -> None:
    whole, layout = MlaLayout(4, kv_dtype), MlaLayout(4, kv_dtype, 256, 32)
    latent, rope = (torch.randn(2, n, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (512, 64))
    slots, filler = torch.tensor([6, 1]), 0x35
    pages, wanted = (torch.full((2, whole.page_bytes), filler, dtype=torch.uint8) for _ in range(2))
    store_mla(wanted, whole, slots, latent, rope)
    store_mla(pages, layout, slots, latent[:, :256], rope[:, :32])
    for found, full in zip(layout.views(pages), layout.views(wanted), strict=True):
        assert (found is None) == (full is None)
        assert found is None or torch.equal(found.view(torch.uint8), full.view(torch.uint8))  # type: ignore[union-attr]
    for part in layout.views(pages):
        if part is not None:
            part.view(torch.uint8).fill_(filler)
    assert (pages == filler).all()


def test_gathering_gives_what_is_used() -> None:
    layout = MlaLayout(4, "bf16", 128, 16)
    pages = layout.allocate(2)
    latent, rope = torch.arange(128.0).bfloat16().view(1, 128), torch.arange(16.0).bfloat16().view(1, 16)
    store_mla(pages, layout, torch.tensor([5]), latent, rope)
    table, lengths = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([6], dtype=torch.int32)
    found = gather_mla(pages, layout, table, lengths)
    assert torch.equal(found[0][0, 5:], latent) and torch.equal(found[1][0, 5:], rope)


@pytest.mark.parametrize("columns, rotary", [(0, 64), (64, 64), (640, 64), (512, 8), (512, 80)])
def test_columns_that_make_no_sense(columns: int, rotary: int) -> None:
    with pytest.raises(ValueError, match=r"layout\.(latent|rope)"):
        MlaLayout(4, "fp8", columns, rotary)
