"""Storing, gathering and copying pages: the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quantkit_kernels.forward.pages import GqaLayout, IndexLayout, MlaLayout

from .case import Case, Outcome, modules, same

cache, twin_cache = modules("cache")


def check_caches(case: Case) -> Iterator[tuple[str, Outcome]]:
    rows = case.normal(6, 600) * torch.logspace(-30, 20, 6)[:, None].bfloat16()
    rows[2, :300], rows[3, 5], rows[4, 7] = 0, float("nan"), float("-inf")
    slots, source, target = torch.tensor([4, -1, 0, 17, 9, 2]), torch.tensor([1, 5]), torch.tensor([2, 4])
    table, lengths = torch.tensor([[1, 5], [3, 0]], dtype=torch.int32), torch.tensor([4, 6], dtype=torch.int32)
    stores: tuple[tuple[str, Any, tuple[Tensor, ...]], ...] = (
        ("gqa", GqaLayout, (rows[:, :26].reshape(6, 2, 13), rows[:, 26:52].reshape(6, 2, 13))),
        ("mla", MlaLayout, (rows[:, 8:520], rows[:, 520:584])),
        ("index_keys", IndexLayout, (rows[:, 3:131],)),
    )
    for name, kind, values in stores:
        for kv_dtype in ("fp8", "bf16"):
            layout = kind(3, 2, 13, kv_dtype) if kind is GqaLayout else kind(3, kv_dtype)
            pools = {}
            for module, device in ((twin_cache, torch.device("cpu")), (cache, case.device)):
                pool = layout.allocate(6, device)
                moved = [value.to(device) for value in values]
                getattr(module, f"store_{name}")(pool, layout, slots.to(device), *moved)
                module.copy_pages(pool, source.to(device), target.to(device))
                found = getattr(module, f"gather_{name}")(pool, layout, table.to(device), lengths.to(device), 6)
                pools[device] = [pool, *(found if isinstance(found, tuple) else (found,))]
            pairs = zip(pools[case.device], pools[torch.device("cpu")], strict=True)
            wrong = sum(same(mine, wanted)[0] for mine, wanted in pairs)
            yield f"store_{name}, copy_pages, gather_{name} {kv_dtype}", (wrong, 0.0)
