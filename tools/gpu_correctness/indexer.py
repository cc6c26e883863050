"""The indexer: scores within a bound, the same choice."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quantkit_kernels.forward.pages import IndexLayout

from .case import Case, Outcome, modules, near, same
from .made_up import context

index, twin_index = modules("index")
_, twin_cache = modules("cache")


def check_index(case: Case) -> Iterator[tuple[str, Outcome]]:
    longest = case.size(3000, 150)
    rows, visible = torch.tensor([1, 0, 1], dtype=torch.int32), torch.tensor([longest, 0, 33], dtype=torch.int32)
    for kv_dtype in ("fp8", "bf16"):
        layout = IndexLayout(case.size(64, 7), kv_dtype)
        pool, table, _ = context(case, layout, [9, longest])
        query, weights = case.normal(3, 32, 128), case.normal(3, 32).float()
        args = (query, weights, pool)
        wanted = twin_index.index_scores(*args, layout, table, rows, visible, longest)
        found = index.index_scores(*case.to(*args), layout, *case.to(table, rows, visible), longest)
        seen = wanted > -torch.inf
        hidden = float((found.cpu()[~seen] != -torch.inf).sum())
        keys = twin_cache.gather_index_keys(pool, layout, table, torch.tensor([9, longest]), longest)
        unit = float((weights.abs() * query.float().norm(dim=-1)).sum(1).max() * keys.float().norm(dim=-1).max())
        error, limit = near(found.cpu()[seen], wanted[seen], unit, 2.0**-17)
        yield f"index_scores {kv_dtype}", (error if not hidden else float("inf"), limit)
    scores = torch.randint(-9, 9, (5, longest), generator=case.generator) / 4.0
    scores[1, 3], scores[2, ::3], scores[3, 5] = float("nan"), -0.0, float("-inf")
    lengths = torch.tensor([longest, longest, 33, 7, 0], dtype=torch.int32)
    for k in (1, 64, case.size(2048, 100)):
        found = index.index_topk(*case.to(scores, lengths), k)
        yield f"index_topk {k}", same(found, twin_index.index_topk(scores, lengths, k))
