"""Page tags on the device; twin/tags.py says what is compared."""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels import tags as kernels
from .launch import launch


def check_page_tags(
    block_table: Tensor, expected_pages: Tensor, expected_tags: Tensor, pool_tags: Tensor, counts: Tensor
) -> Tensor:
    requests, entries = block_table.shape
    out = torch.empty(requests, dtype=torch.bool, device=block_table.device)
    launch(
        kernels.check_page_tags_kernel, (requests,), block_table, block_table.stride(0), expected_pages,
        expected_pages.stride(0), expected_tags.view(torch.int64), expected_tags.stride(0),
        pool_tags.view(torch.int64), counts.contiguous(), out, entries, pool_tags.numel(), BLOCK=256,
    )  # fmt: skip
    return out
