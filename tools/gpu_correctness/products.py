"""Linears and experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from quantkit_kernels.forward.weights import Experts, Int4Weight

from .case import Case, Outcome, modules, near, same
from .made_up import fp8, int4, move

linear, twin_linear = modules("linear")
experts, twin_experts = modules("experts")


def check_linears(case: Case) -> Iterator[tuple[str, Outcome]]:
    outputs, columns = case.size(579, 33), case.size(4224, 256)
    weights: list[tuple[str, Any]] = [
        (f"int4_linear g{g}", int4(case, outputs, columns, g)) for g in (32, 64, 128)
    ]
    weights += [("fp8_linear", fp8(case, outputs, columns)), ("fp8_linear 64x96", fp8(case, 67, 300, (64, 96)))]
    for name, weight in weights:
        moved = move(weight, case.device)
        function: Any = linear.int4_linear if isinstance(weight, Int4Weight) else linear.fp8_linear
        exact = twin_linear.dequantize(weight, slice(0, weight.out_features)).double()
        most = case.size(300, 20)
        x = case.normal(most, weight.in_features)
        (there,) = case.to(x)
        whole = torch.empty(most, weight.out_features, dtype=torch.bfloat16, device=case.device)
        function(there, moved, whole)
        wanted, size = x.double() @ exact.T, x.double().abs() @ exact.abs().T
        limit = (weight.in_features / 128 + 16) * 2.0**-24 * size + 2.0**-8 * wanted.abs()
        yield name, near(whole, wanted, limit.clamp(min=1e-30), 1.0)
        for tokens in (1, 7, 33):
            if tokens < most:
                few = torch.empty_like(whole[:tokens])
                function(there[:tokens], moved, few)
                yield f"{name}, {tokens} of {most} rows: same bits", same(few, whole[:tokens].cpu())


def check_experts(case: Case) -> Iterator[tuple[str, Outcome]]:
    hidden, inner, count = case.size(640, 128), case.size(256, 128), case.size(9, 2)
    for kind in ("int4", "fp8"):

        def one(rows: int, columns: int, kind: str = kind) -> Any:
            return int4(case, rows, columns, 32) if kind == "int4" else fp8(case, rows, columns)

        parts = [
            [one(*size) for _ in range(count)] for size in ((inner, hidden), (inner, hidden), (hidden, inner))
        ]
        layer: Any = Experts(*parts)
        moved: Any = Experts(*([move(w, case.device) for w in part] for part in parts))
        function: Any = experts.moe_int4 if kind == "int4" else experts.moe_fp8
        twin: Any = twin_experts.moe_int4 if kind == "int4" else twin_experts.moe_fp8
        for tokens in (1, case.size(350, 5)):
            x, weights = case.normal(tokens, hidden) * 0.2, torch.rand(tokens, 3, generator=case.generator)
            ids = torch.randint(-1, count, (tokens, 3), generator=case.generator, dtype=torch.int32)
            ids[0] = torch.arange(3) % count
            wanted, found = torch.empty_like(x), torch.empty_like(x, device=case.device)
            twin(x, ids, weights, layer, wanted)
            function(*case.to(x, ids, weights), moved, found)
            yield f"moe_{kind}, {tokens} tokens", near(found, wanted, wanted.double().abs().max(), 2.0**-6)
        alone = torch.empty_like(found[:1])
        function(*case.to(x[:1], ids[:1], weights[:1]), moved, alone)
        yield f"moe_{kind}, a token alone: same bits", same(alone, found[:1].cpu())
