"""Page layouts: sizes, views against the bytes, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quantkit_kernels.forward.pages import GqaLayout, IndexLayout, MlaLayout, PageLayout

from . import paged

LAYOUTS = [
    GqaLayout(16, 4, 128), GqaLayout(3, 1, 7),
    GqaLayout(5, 3, 67, "bf16"), GqaLayout(1, 1, 1), GqaLayout(7, 2,
    33), MlaLayout(64), MlaLayout(1), MlaLayout(13, "bf16"), IndexLayout(64), IndexLayout(7), IndexLayout(5,
    "bf16"),
]  # fmt: skip


def test_bytes_of_a_token() -> None:
    assert MlaLayout(64).page_bytes == 64 * 656
    assert MlaLayout(64, "bf16").page_bytes == 64 * 1152
    assert IndexLayout(64).page_bytes == 64 * 132
    assert IndexLayout(64, "bf16").page_bytes == 64 * 256
    assert GqaLayout(16, 4, 128).page_bytes == 16 * 4 * 2 * 132
    assert GqaLayout(16, 4, 128, "bf16").page_bytes == 16 * 4 * 2 * 256
    assert GqaLayout(3, 1, 7).page_bytes == 68  # 66 and padding


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_views_are_the_bytes(layout: Any) -> None:
    pages = paged.fill(layout, 4, torch.Generator().manual_seed(1))
    views = layout.views(pages)
    for page in (0, 3):
        for offset in {0, layout.page_size - 1}:
            raw = pages[page].numpy()
            if isinstance(layout, IndexLayout):
                found = [
                    views.key[page, offset].double() * (1 if views.scale is None else views.scale[page, offset])
                ]
                wanted = [paged.index_token(raw, layout, offset)]
            elif isinstance(layout, MlaLayout):
                scale = torch.ones(4) if views.scale is None else views.scale[page, offset]
                latent = views.latent[page, offset].double().unflatten(0, (4, 128)) * scale.double()[:, None]
                found = [latent.flatten(), views.rope[page, offset].double()]
                wanted = list(paged.mla_token(raw, layout, offset))
            else:
                found = [
                    part[page, :, offset].double() * (1 if s is None else s[page, :, offset, None].double())
                    for part, s in ((views.key, views.key_scale), (views.value, views.value_scale))
                ]
                wanted = list(paged.gqa_token(raw, layout, offset))
            for f, w in zip(found, wanted, strict=True):
                np.testing.assert_allclose(f.numpy(), w, rtol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_views_share_memory_and_stay_in_their_page(layout: Any) -> None:
    stride = layout.page_bytes + 12  # other layers between the pages
    around = torch.full((3, stride), 0xAB, dtype=torch.uint8)
    pages = around[:, 4 : 4 + layout.page_bytes]
    assert layout.check(pages) is pages
    for part in layout.views(pages):
        if part is not None:
            part.view(torch.uint8).zero_()
    assert (around[:, :4] == 0xAB).all() and (around[:, 4 + layout.page_bytes :] == 0xAB).all()
    padding = {GqaLayout(3, 1, 7): 2, GqaLayout(1, 1, 1): 2}.get(layout, 0)
    used = layout.page_bytes - padding
    assert (pages[:, :used] == 0).all() and (pages[:, used:] == 0xAB).all()


@pytest.mark.parametrize("num_pages", [0, 1])
def test_views_of_hardly_any_pages(num_pages: int) -> None:
    for layout in LAYOUTS:
        pages = layout.check(layout.allocate(num_pages))
        assert all(part is None or part.shape[0] == num_pages for part in layout.views(pages))


@pytest.mark.parametrize(
    "make",
    [
        lambda: GqaLayout(0, 1, 8), lambda: GqaLayout(1, 0, 8), lambda: GqaLayout(1, 1, 0),
        lambda: MlaLayout(16, "fp4"), lambda: IndexLayout(-1),
    ],
)  # fmt: skip
def test_layouts_that_make_no_sense(make: Any) -> None:
    with pytest.raises(ValueError, match=r"layout\."):
        make()


def test_pools_that_do_not_fit() -> None:
    layout: PageLayout = IndexLayout(4)
    with pytest.raises(TypeError, match="pages"):
        layout.check(torch.zeros(2, layout.page_bytes, dtype=torch.int8))
    with pytest.raises(ValueError, match="pages"):
        layout.check(torch.zeros(2, layout.page_bytes + 4, dtype=torch.uint8))
    with pytest.raises(ValueError, match="pages"):
        layout.check(torch.zeros(1, layout.page_bytes, dtype=torch.uint8).expand(2, -1))
    with pytest.raises(ValueError, match="pages"):
        layout.check(torch.zeros(2, layout.page_bytes + 6, dtype=torch.uint8)[:, : layout.page_bytes])
    with pytest.raises(ValueError, match="pages"):
        layout.check(torch.zeros(2, layout.page_bytes + 8, dtype=torch.uint8)[:, 2 : 2 + layout.page_bytes])
    with pytest.raises(ValueError, match="pages"):
        layout.check(torch.zeros(layout.page_bytes, 2, dtype=torch.uint8).T)
