"""Weights and pools of pages, made up in host memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantkit_kernels.forward.pages import PageLayout
from quantkit_kernels.forward.weights import Fp8Weight, Int4Weight

from .case import Case


def move(weight: Any, device: torch.device) -> Any:
    if isinstance(weight, Int4Weight):
        return Int4Weight(weight.packed.to(device), weight.scale.to(device))
    return Fp8Weight(weight.codes.to(device), weight.scale.to(device), weight.block)


def int4(case: Case, rows: int, columns: int, group: int) -> Int4Weight:
    packed = torch.randint(-(2**31), 2**31, (rows, columns // 8), generator=case.generator).int()
    return Int4Weight(packed, (torch.rand(rows, columns // group, generator=case.generator) * 0.01).bfloat16())


def fp8(case: Case, rows: int, columns: int, block: tuple[int, int] = (128, 128)) -> Fp8Weight:
    codes = torch.randint(0, 256, (rows, columns), generator=case.generator).to(torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x11
    scale = torch.rand(-(-rows // block[0]), -(-columns // block[1]), generator=case.generator) * 1e-3
    return Fp8Weight(codes.view(torch.float8_e4m3fn), scale, block)


def fill(case: Case, layout: PageLayout, pages: int) -> Tensor:
    """Random finite content."""
    pool = layout.allocate(pages)
    pool.copy_(torch.randint(0, 256, pool.shape, generator=case.generator, dtype=torch.uint8))
    for part in layout.views(pool):  # type: ignore[attr-defined]
        if part is not None and part.dtype == torch.float8_e4m3fn:
            raw = part.view(torch.uint8)
            raw[(raw & 0x7F) == 0x7F] = 0x11
        elif part is not None and part.dtype == torch.float32:
            part.copy_(torch.rand(part.shape, generator=case.generator) * 0.01 + 0.001)
        elif part is not None:
            part.copy_(torch.randn(part.shape, generator=case.generator).bfloat16())
    return pool


def context(case: Case, layout: PageLayout, lengths: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """A pool, a table of pages in random order, the lengths."""
    need = [-(-n // layout.page_size) for n in lengths]
    order = torch.randperm(sum(need) + 1, generator=case.generator).int()
    table = torch.full((len(lengths), max(need) + 1), -1, dtype=torch.int32)
    for row, count in enumerate(need):
        first = sum(need[:row])
        table[row, :count] = order[first : first + count]
    return fill(case, layout, len(order)), table, torch.tensor(lengths, dtype=torch.int32)


def paged(parts: Any, layout: PageLayout) -> tuple[Tensor, Any, Tensor, Tensor]:
    return parts[0], layout, parts[1], parts[2]
