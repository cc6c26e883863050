"""Latent attention, dense and sparse."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from quantkit_kernels.forward.pages import MlaLayout

from .case import Case, Outcome, modules, near
from .made_up import context, paged

mla, twin_mla = modules("mla")
_, twin_cache = modules("cache")


def check_mla(case: Case) -> Iterator[tuple[str, Outcome]]:
    heads, longest = case.size(64, 3), case.size(1400, 40)
    chunks, lengths = [1, case.size(20, 2), 0], [1, longest, 5]
    starts = torch.tensor(np.cumsum([0, *chunks]), dtype=torch.int32)
    for kv_dtype in ("fp8", "bf16"):
        layout = MlaLayout(case.size(64, 5), kv_dtype)
        parts = context(case, layout, lengths)
        there = case.to(*parts)
        unit = float(twin_cache.gather_mla(*paged(parts, layout), longest)[0].float().abs().max())
        latent, rope = case.normal(3, heads, 512), case.normal(3, heads, 64)
        chosen = torch.full((3, case.size(600, 40)), -1, dtype=torch.int32)
        chosen[1, : longest // 3] = torch.randperm(longest, generator=case.generator)[: longest // 3].int()
        for indices in (None, chosen):
            wanted, found = torch.empty_like(latent), torch.empty_like(latent, device=case.device)
            sparse = None if indices is None else indices.to(case.device)
            twin_mla.mla_decode(latent, rope, *paged(parts, layout), scale=0.04, indices=indices, out=wanted)
            mla.mla_decode(*case.to(latent, rope), *paged(there, layout), scale=0.04, indices=sparse, out=found)
            yield (
                f"mla_decode {kv_dtype}{'' if indices is None else ' sparse'}",
                near(found, wanted, unit, 2.0**-7),
            )
        tokens = sum(chunks)
        latent, rope = case.normal(tokens, heads, 512), case.normal(tokens, heads, 64)
        own = {"fresh_latent": case.normal(tokens, 512), "fresh_rope": case.normal(tokens, 64)}
        moved = {name: part.to(case.device) for name, part in own.items()}
        wanted, found = torch.empty_like(latent), torch.empty_like(latent, device=case.device)
        args, away = (parts[1], starts, parts[2]), case.to(parts[1], starts, parts[2])
        twin_mla.mla_prefill(latent, rope, parts[0], layout, *args, scale=0.04, indices=None, out=wanted, **own)
        mla.mla_prefill(
            *case.to(latent, rope), there[0], layout, *away, scale=0.04, indices=None, out=found, **moved
        )
        yield f"mla_prefill {kv_dtype} fresh", near(found, wanted, max(unit, 6.0), 2.0**-7)
