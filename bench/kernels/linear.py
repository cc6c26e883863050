"""int4_linear and fp8_linear: bytes per second at one row against read bandwidth; INT4 against torch's own kernel.

    python bench/kernels/linear.py [FILE.json]

One matrix of each format, several times the last-level cache; calls take turns, best run of each. The peer is
torch's ``_weight_int4pack_mm_for_cpu`` on the same shape and group size.
"""

from __future__ import annotations

import sys

import torch
from limits import GIB, best_of_each, readers

from measure import Row, write_rows
from quantkit_kernels.forward.linear import fp8_linear, int4_linear
from quantkit_kernels.forward.weights import Fp8Weight, Int4Weight

OUTPUTS, INPUTS = 65536, 6144
PEER_ROWS = (1, 2, 4, 8, 64)


def int4_weight(outputs: int, inputs: int, group: int) -> Int4Weight:
    packed = torch.randint(-(2**31), 2**31 - 1, (outputs, inputs // 8), dtype=torch.int32)
    return Int4Weight(packed, (torch.rand(outputs, inputs // group) * 0.01).bfloat16())


def fp8_weight(outputs: int, inputs: int) -> Fp8Weight:
    codes = torch.randint(0, 256, (outputs, inputs), dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    scale = torch.rand(-(-outputs // 128), -(-inputs // 128)) * 1e-3
    return Fp8Weight(codes.view(torch.float8_e4m3fn), scale)


def size(weight: Int4Weight | Fp8Weight) -> int:
    return (weight.packed if isinstance(weight, Int4Weight) else weight.codes).nbytes + weight.scale.nbytes


def one_row() -> list[Row]:
    weights = {
        "int4_linear g32": int4_weight(OUTPUTS, INPUTS, 32),
        "int4_linear g128": int4_weight(OUTPUTS, INPUTS, 128),
        "fp8_linear": fp8_weight(OUTPUTS, INPUTS),
    }
    x = torch.randn(1, INPUTS).bfloat16()
    calls = {
        name: (lambda w=w: int4_linear(x, w)) if isinstance(w, Int4Weight) else (lambda w=w: fp8_linear(x, w))
        for name, w in weights.items()
    }
    times = best_of_each(calls | readers(), 1.5, 40)
    peak = GIB / min(seconds for name, seconds in times.items() if name not in calls)
    return [
        Row(
            f"{name}, 1 row of {OUTPUTS} x {INPUTS}",
            size(weights[name]) / seconds / 1e9,
            "GB/s",
            "read bandwidth",
            peak / 1e9,
            ">= 90 % of it",
            size(weights[name]) / seconds >= 0.9 * peak,
        )
        for name, seconds in times.items()
        if name in calls
    ]


def against_torch(outputs: int = 16384, inputs: int = 6144, group: int = 32) -> list[Row]:
    weight = int4_weight(outputs, inputs, group)
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    del codes
    scales = (torch.rand(inputs // group, outputs, 2) * 0.01).bfloat16()
    out = []
    for n in PEER_ROWS:
        x = torch.randn(n, inputs).bfloat16()
        times = best_of_each(
            {
                "ours": lambda x=x: int4_linear(x, weight),
                "torch": lambda x=x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group, scales),
            },
            0.5,
        )
        target = 2.0 if n == 64 else 1.0
        ratio = times["torch"] / times["ours"]
        name = f"int4_linear g{group}, {n} rows of {outputs} x {inputs}"
        out.append(
            Row(
                name,
                times["ours"] * 1e3,
                "ms",
                "torch _weight_int4pack_mm, ms",
                times["torch"] * 1e3,
                f"{target:g} times as fast (is {ratio:.2f})",
                ratio >= target,
            )
        )
    return out


def rows() -> list[Row]:
    return one_row() + against_torch()


if __name__ == "__main__":
    write_rows(rows(), sys.argv[1] if len(sys.argv) > 1 else None)
