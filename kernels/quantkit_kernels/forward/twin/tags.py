"""Reference of ``forward/tags.py``."""

from __future__ import annotations

import torch
from torch import Tensor


def check_page_tags(
    block_table: Tensor, expected_pages: Tensor, expected_tags: Tensor, pool_tags: Tensor, counts: Tensor
) -> Tensor:
    entries, tags = block_table.shape[1], pool_tags.view(torch.int64)  # uint64 has few operations
    used = torch.arange(entries, device=counts.device) < counts[:, None]
    good = (block_table >= 0) & (block_table < tags.numel()) & (block_table == expected_pages)
    if tags.numel():
        found = tags[block_table.clamp(0, tags.numel() - 1).long()]
        good &= found == expected_tags.view(torch.int64)
    return (good | ~used).all(1) & (counts >= 0) & (counts <= entries)
