"""Grouped-query attention."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from quantkit_kernels.forward.pages import GqaLayout

from .case import Case, Outcome, modules, near, same
from .made_up import context, paged

gqa, twin_gqa = modules("gqa")
_, twin_cache = modules("cache")


def check_gqa(case: Case) -> Iterator[tuple[str, Outcome]]:
    chunks, lengths = [1, case.size(200, 9), 0, case.size(33, 3)], [1, case.size(1400, 40), 5, case.size(700, 20)]
    starts = torch.tensor(np.cumsum([0, *chunks]), dtype=torch.int32)
    for kv_dtype, dim in (("fp8", 128), ("bf16", 67)):
        layout = GqaLayout(16, 2, dim, kv_dtype)
        parts = context(case, layout, lengths)
        there = case.to(*parts)
        most = max(part.float().abs().max() for part in twin_cache.gather_gqa(*paged(parts, layout), max(lengths)))
        query = case.normal(4, 8, dim)
        wanted, found = torch.empty_like(query), torch.empty_like(query, device=case.device)
        twin_gqa.gqa_decode(query, *paged(parts, layout), scale=dim**-0.5, out=wanted)
        gqa.gqa_decode(*case.to(query), *paged(there, layout), scale=dim**-0.5, out=found)
        yield f"gqa_decode {kv_dtype}", near(found, wanted, most, 2.0**-7)
        alone = torch.empty_like(found[1:2])
        pool, table, length = there
        one = (pool, layout, table[1:2], length[1:2])
        gqa.gqa_decode(query[1:2].to(case.device), *one, scale=dim**-0.5, out=alone)
        yield f"gqa_decode {kv_dtype}, a row alone: same bits", same(alone, found[1:2].cpu())
        tokens = sum(chunks)
        queries, key, value = case.normal(tokens, 8, dim), case.normal(tokens, 2, dim), case.normal(tokens, 2, dim)
        for fresh in ((None, None), (key, value)):
            wanted, found = torch.empty_like(queries), torch.empty_like(queries, device=case.device)
            own = {"fresh_key": fresh[0], "fresh_value": fresh[1]}
            moved = {name: None if part is None else part.to(case.device) for name, part in own.items()}
            args, away = (parts[1], starts, parts[2]), case.to(parts[1], starts, parts[2])
            twin_gqa.gqa_prefill(queries, parts[0], layout, *args, scale=0.1, out=wanted, **own)
            gqa.gqa_prefill(*case.to(queries), there[0], layout, *away, scale=0.1, out=found, **moved)
            unit = max(float(most), 6.0)
            name = f"gqa_prefill {kv_dtype}{' fresh' if fresh[0] is not None else ''}"
            yield name, near(found, wanted, unit, 2.0**-7)
