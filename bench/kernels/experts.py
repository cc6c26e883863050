"""moe_int4 and moe_fp8 on one GLM-5.2 layer: one token against each other and torch, 512 tokens against BF16.

    python bench/kernels/experts.py [FILE.json]

Hidden 6144, intermediate 2048, 16 experts, top-8. One token reads eight experts, the other eight the next
time: 0.16 GiB in INT4 and 0.28 GiB in FP8. Calls take turns, best run of each.
"""

from __future__ import annotations

import sys
from itertools import count

import torch
from limits import best_of_each, read_bandwidth
from linear import fp8_weight, int4_weight, size
from torch import Tensor

from measure import Row, write_rows
from quantkit_kernels.forward.experts import moe_fp8, moe_int4
from quantkit_kernels.forward.weights import Experts, Fp8Weight, Int4Weight

HIDDEN, INNER, EXPERTS, TOP = 6144, 2048, 16, 8
PROMPT = 512


def layer(kind: str) -> Experts[Int4Weight] | Experts[Fp8Weight]:
    def weights(outputs: int, inputs: int) -> list[Int4Weight | Fp8Weight]:
        group = {"g32": 32, "g128": 128}.get(kind)
        make = (lambda: int4_weight(outputs, inputs, group)) if group else (lambda: fp8_weight(outputs, inputs))
        return [make() for _ in range(EXPERTS)]

    return Experts(weights(INNER, HIDDEN), weights(INNER, HIDDEN), weights(HIDDEN, INNER))


def run(kind: str, hidden: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    return (moe_fp8 if kind == "fp8" else moe_int4)(hidden, ids, weights, experts)


def dequantized(weight: Int4Weight | Fp8Weight) -> Tensor:
    """bfloat16 by plain torch."""
    if isinstance(weight, Int4Weight):
        nibbles = (weight.packed.unsqueeze(-1) >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15
        return (nibbles - 8).flatten(1).bfloat16() * weight.scale.repeat_interleave(weight.group_size, dim=1)
    spread = weight.scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return weight.codes.bfloat16() * spread[: weight.out_features, : weight.in_features].bfloat16()


def by_torch(hidden: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    """The layer as dequantize and matrix product, expert by expert."""
    linear, out = torch.nn.functional.linear, torch.zeros_like(hidden)
    for k, e in enumerate(ids[0].tolist()):
        gate, up = (linear(hidden, dequantized(w)) for w in (experts.gate[e], experts.up[e]))
        h = torch.nn.functional.silu(gate) * up
        out += linear(h, dequantized(experts.down[e])) * weights[0, k].bfloat16()
    return out


def one_token(layers: dict[str, Experts]) -> list[Row]:
    hidden, weights = torch.randn(1, HIDDEN).bfloat16(), torch.rand(1, TOP)
    halves = [torch.arange(TOP)[None], torch.arange(TOP, 2 * TOP)[None]]
    turn = count()
    calls = {
        kind: (lambda kind=kind: run(kind, hidden, halves[next(turn) % 2], weights, layers[kind]))
        for kind in layers
    }
    seconds = best_of_each(calls, 1.0, 40)
    plain = {
        kind: best_of_each({kind: lambda kind=kind: by_torch(hidden, halves[0], weights, layers[kind])}, 0.0, 2)[
            kind
        ]
        for kind in ("g32", "fp8")
    }
    peak = read_bandwidth()
    parts = ("gate", "up", "down")
    read = {kind: sum(size(getattr(layers[kind], part)[0]) for part in parts) * TOP for kind in layers}
    out = []
    for kind, least in (("g32", 1.6), ("g128", 1.75)):
        ratio = seconds["fp8"] / seconds[kind]
        target = f"moe_fp8 / moe_int4 >= {least}"
        out.append(
            Row(f"moe_int4 {kind}, 1 token: times moe_fp8", ratio, "times", None, None, target, ratio >= least)
        )
    for kind, slow in plain.items():
        ratio = slow / seconds[kind]
        name = f"moe {kind}, 1 token: times dequantize and matmul"
        target = ">= 10" if kind != "fp8" else None
        out.append(Row(name, ratio, "times", "torch, ms", slow * 1e3, target, ratio >= 10 if target else None))
    for kind, taken in seconds.items():
        rate = read[kind] / taken
        out.append(Row(f"moe {kind}, 1 token", taken * 1e3, "ms"))
        out.append(Row(f"moe {kind}, 1 token: weights read", rate / 1e9, "GB/s", "read bandwidth", peak / 1e9))
    return out


def prompt(layers: dict[str, Experts]) -> list[Row]:
    """Every expert gets PROMPT * TOP / EXPERTS tokens; torch's rate is that of its linears on the same shapes."""
    hidden, weights = torch.randn(PROMPT, HIDDEN).bfloat16(), torch.rand(PROMPT, TOP)
    ids = (torch.arange(PROMPT)[:, None] + 2 * torch.arange(TOP)) % EXPERTS
    each = PROMPT * TOP // EXPERTS
    x, h = torch.randn(each, HIDDEN).bfloat16(), torch.randn(each, INNER).bfloat16()
    wide, down = torch.randn(INNER, HIDDEN).bfloat16(), torch.randn(HIDDEN, INNER).bfloat16()
    linear = torch.nn.functional.linear
    calls = {
        kind: (lambda kind=kind: run(kind, hidden, ids, weights, layers[kind])) for kind in ("g32", "g128", "fp8")
    }
    seconds = best_of_each(calls, 2.0, 3)
    torch_times = best_of_each({"wide": lambda: linear(x, wide), "down": lambda: linear(h, down)}, 1.0, 10)
    flop = 2.0 * each * HIDDEN * INNER
    peak = 3 * flop / (2 * torch_times["wide"] + torch_times["down"])
    rates = {kind: EXPERTS * 3 * flop / taken for kind, taken in seconds.items()}
    out = [
        Row(
            f"moe {kind}, {PROMPT} tokens",
            rate / 1e9,
            "GFLOP/s",
            "torch BF16",
            peak / 1e9,
            ">= 75 % of it" if kind == "fp8" else None,
            rate >= 0.75 * peak if kind == "fp8" else None,
        )
        for kind, rate in rates.items()
    ]
    ratio = rates["fp8"] / rates["g32"]
    return [*out, Row(f"moe_fp8 / moe_int4 g32, {PROMPT} tokens", ratio, "times", "published on GPUs", 1.17)]


def rows() -> list[Row]:
    layers = {kind: layer(kind) for kind in ("g32", "g128", "fp8")}
    return one_token(layers) + prompt(layers)


if __name__ == "__main__":
    write_rows(rows(), sys.argv[1] if len(sys.argv) > 1 else None)
