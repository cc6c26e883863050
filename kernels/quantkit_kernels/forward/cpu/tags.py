"""``forward/tags.py`` in host memory: the native compare of ``quantkit_kernels.tags``."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit_kernels import tags


def check_page_tags(
    block_table: Tensor, expected_pages: Tensor, expected_tags: Tensor, pool_tags: Tensor, counts: Tensor
) -> Tensor:
    parts = (block_table, expected_pages, expected_tags, pool_tags, counts.contiguous())
    return torch.from_numpy(tags.check_page_tags(*(part.numpy() for part in parts)).copy())
