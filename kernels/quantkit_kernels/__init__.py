"""Conversion operations of quantkit: FP8, bf16 and group INT4 weights, numpy in and numpy out.

Two implementations behind an explicit registry (``registry.py``): ``torch``, the reference twin and specification,
and ``cpu``, native C++ (``native.py``), with identical bits. ``ops.py`` states shapes, numerics and errors.

Left out: linear, expert and attention operations, which come with the serving engine.
"""

from .errors import BadValueError, NanCodeError, NonFiniteError
from .ops import (
    bf16_to_float32,
    float32_to_bf16,
    float_to_fp8,
    float_to_int4,
    fp8_to_bf16,
    fp8_to_float32,
    fp8_to_int4,
    int4_to_bf16,
    int4_to_float32,
)
from .registry import BackendInfo, backend, describe
from .types import GROUP_SIZES, Int4Weight

__all__ = [
    "GROUP_SIZES",
    "BackendInfo",
    "BadValueError",
    "Int4Weight",
    "NanCodeError",
    "NonFiniteError",
    "backend",
    "bf16_to_float32",
    "describe",
    "float32_to_bf16",
    "float_to_fp8",
    "float_to_int4",
    "fp8_to_bf16",
    "fp8_to_float32",
    "fp8_to_int4",
    "int4_to_bf16",
    "int4_to_float32",
]
