"""Made-up weights for the tests of linears and experts, and what they decode to in float64 by plain loops."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quantkit_kernels.forward.weights import Experts, Fp8Weight, Int4Weight


def int4(seed: int, rows: int, columns: int, group: int) -> Int4Weight:
    g = torch.Generator().manual_seed(seed)
    packed = torch.randint(-(2**31), 2**31, (rows, columns // 8), generator=g).to(torch.int32)
    scale = (torch.rand(rows, columns // group, generator=g) + 0.5) * 0.01
    return Int4Weight(packed, scale.bfloat16())


def fp8(seed: int, rows: int, columns: int, block: tuple[int, int] = (128, 128)) -> Fp8Weight:
    """Every finite code, subnormals and both zeros included."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns), generator=g).to(torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x7E
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    return Fp8Weight(codes.view(torch.float8_e4m3fn), (torch.rand(grid, generator=g) + 0.5) * 1e-3, block)


def experts(kind: str, seed: int, count: int, hidden: int, inner: int, group: int = 32) -> Experts:
    def one(index: int, rows: int, columns: int) -> Int4Weight | Fp8Weight:
        if kind == "int4":
            return int4(seed * 1000 + index, rows, columns, group)
        return fp8(seed * 1000 + index, rows, columns)

    return Experts(
        [one(3 * e, inner, hidden) for e in range(count)],
        [one(3 * e + 1, inner, hidden) for e in range(count)],
        [one(3 * e + 2, hidden, inner) for e in range(count)],
    )


def decoded(weight: Int4Weight | Fp8Weight) -> np.ndarray:
    """float64 ``[O, I]``."""
    if isinstance(weight, Int4Weight):
        words = weight.packed.numpy().astype(np.int64)
        nibbles = np.stack([(words >> (4 * i)) & 15 for i in range(8)], axis=-1).reshape(words.shape[0], -1)
        scale = weight.scale.double().numpy()
        return (nibbles - 8) * np.repeat(scale, weight.group_size, axis=1)
    codes = weight.codes.contiguous().view(torch.uint8).numpy()
    values = np.array([e4m3(code) for code in range(256)])[codes]
    out = np.empty(codes.shape)
    for o in range(codes.shape[0]):
        for b in range(weight.scale.shape[1]):
            part = slice(b * weight.block[1], (b + 1) * weight.block[1])
            out[o, part] = values[o, part] * float(weight.scale[o // weight.block[0], b])
    return out


def e4m3(code: int) -> float:
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if code & 0x7F == 0x7F:
        return float("nan")
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


def activations(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
