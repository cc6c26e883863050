"""Conversions of weights: the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from quantkit_kernels.forward.triton import conversion
from quantkit_kernels.search import METHODS
from quantkit_kernels.torch_twin import TorchTwin

from .case import Case, Outcome, same


def check_conversions(case: Case) -> Iterator[tuple[str, Outcome]]:
    rng = np.random.default_rng(5)
    mine, twin = conversion.TritonBackend(), TorchTwin()
    rows = case.size(700, 3)
    codes = rng.integers(0, 256, (rows, 384), dtype=np.uint8)
    codes[codes & 0x7F == 0x7F] = 0x7E
    scales = (rng.random((-(-rows // 128), 3), dtype=np.float32) + 0.5) * np.float32(2e-4)
    weight = (rng.standard_normal((rows, 384)) * 10.0 ** rng.uniform(-6, 2, 384)).astype(np.float32)
    importance = rng.random(384, dtype=np.float32)
    block = (128, 128)
    runs: dict[str, Callable[[Any], Any]] = {
        "fp8_to_float32": lambda b: b.fp8_to_float32(codes, scales, block, 0),
        "fp8_to_bf16": lambda b: b.fp8_to_bf16(codes, scales, block, 0),
        "float_to_int4 importance": lambda b: b.float_to_int4(weight, 0, 64, METHODS["mse"], importance),
        "float_to_fp8": lambda b: b.float_to_fp8(weight, 0, block),
        "float32_to_bf16": lambda b: b.float32_to_bf16(weight.reshape(-1)),
        "bf16_to_float32": lambda b: b.bf16_to_float32(weight.view(np.uint16).reshape(-1)),
    }
    for group in (32, 64, 128):
        for name, method in METHODS.items():
            runs[f"fp8_to_int4 g{group} {name}"] = partial(_fp8_to_int4, (codes, scales, block, 0, group, method))
    packed = twin.fp8_to_int4(codes, scales, block, 0, 32, METHODS["rtn"])
    runs["int4_to_float32"] = lambda b: b.int4_to_float32(packed.packed, packed.scale, 384, 32)
    runs["int4_to_bf16"] = lambda b: b.int4_to_bf16(packed.packed, packed.scale, 384, 32)
    for name, run in runs.items():
        pairs = zip(_arrays(run(mine)), _arrays(run(twin)), strict=True)
        yield name, (float(sum(same(torch.from_numpy(a), torch.from_numpy(b))[0] for a, b in pairs)), 0.0)


def _fp8_to_int4(arguments: tuple[Any, ...], backend: Any) -> Any:
    return backend.fp8_to_int4(*arguments)


def _arrays(result: Any) -> list[Any]:
    if isinstance(result, np.ndarray):
        return [result]
    return (
        list(result) if isinstance(result, tuple) else [result.packed, result.scale, result.error, result.energy]
    )
