"""Every Triton operation against its torch twin: the kernels on a device, the twins in host memory.

Conversions, caches, top-k and tags must have the twin's bits; sums are held to the bounds that the public modules
state. Besides, a row alone must have the bits that it has in a batch.

Legend: as in quantkit_kernels.forward.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from .caches import check_caches
from .case import Case, Check, Run
from .conversions import check_conversions
from .gqa import check_gqa
from .indexer import check_index
from .mla import check_mla
from .products import check_experts, check_linears
from .tags import check_tags

GROUPS: tuple[Run, ...] = (
    check_linears, check_experts, check_caches, check_gqa, check_mla, check_index, check_tags, check_conversions,
)  # fmt: skip


def run_checks(device: torch.device, *, is_tiny: bool) -> Iterator[Check]:
    """All checks; one that raises is a failed check, and the others go on."""
    for group in GROUPS:
        case = Case(device, is_tiny, torch.Generator().manual_seed(20))
        start = time.perf_counter()
        try:
            for name, (error, limit) in group(case):
                now = time.perf_counter()
                yield Check(name, error <= limit, error, limit, now - start)
                start = now
        except Exception as problem:  # a kernel that fails must not hide what the others do
            name = group.__name__.removeprefix("check_")
            yield Check(name, False, float("inf"), 0.0, time.perf_counter() - start, f"{problem!r:.2000}")
