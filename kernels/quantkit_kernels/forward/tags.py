"""Page tags of tensors: ``quantkit_kernels.tags`` for tables that live on a device; in host memory, use that one.

Legend: R requests, P entries of a row of the block table, N pages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import check
from .choice import implementation


def check_page_tags(
    block_table: Tensor, expected_pages: Tensor, expected_tags: Tensor, pool_tags: Tensor, counts: Tensor
) -> Tensor:
    """Whether each request's pages and their tags are the expected ones; nothing waits for the device.

    Args:
        block_table, expected_pages: int32 ``[R, P]``, rows contiguous.
        expected_tags: uint64 ``[R, P]``, rows contiguous.
        pool_tags: uint64 ``[N]``, contiguous.
        counts: int32 ``[R]``, how many entries of a row count; the others may hold anything.

    Returns:
        bool ``[R]``. False too for a page outside the pool or a count outside [0, P].

    Raises:
        TypeError, ValueError: dtype, shape, device or strides do not fit; the message names the argument.
    """
    check.matrix("block_table", block_table, torch.int32)
    for name, value, dtype in (
        ("expected_pages", expected_pages, torch.int32),
        ("expected_tags", expected_tags, torch.uint64),
    ):
        check.matrix(name, value, dtype)
        check.shape(name, value, *block_table.shape)
        check.same_device(name, value, block_table)
    check.tensor("pool_tags", pool_tags, torch.uint64, dims=1)
    check.same_device("pool_tags", pool_tags, block_table)
    if not pool_tags.is_contiguous():
        raise ValueError(f"pool_tags must be contiguous, got strides {list(pool_tags.stride())}")
    check.tensor("counts", counts, torch.int32)
    check.shape("counts", counts, block_table.shape[0])
    check.same_device("counts", counts, block_table)
    found: Tensor = implementation("tags", block_table).check_page_tags(
        block_table, expected_pages, expected_tags, pool_tags, counts
    )
    return found
