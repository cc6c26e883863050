"""Names and sizes of safetensors dtypes, as the format spells them.

Why not torch dtypes: reading headers, planning and copying bytes must not import torch (285 MiB and more
than a second), and a checkpoint may hold dtypes that the installed torch does not know.

Source: safetensors 0.8 format description (``safetensors/src/tensor.rs``, enum ``Dtype``).
"""

from __future__ import annotations

from math import prod

BITS: dict[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a dense tensor; sub-byte dtypes must fill whole bytes.

    Raises:
        ValueError: dtype unknown, or the bits do not fill whole bytes.
    """
    if dtype not in BITS:
        raise ValueError(f"unknown dtype {dtype!r}")
    bits = BITS[dtype] * prod(shape)
    if bits % 8:
        raise ValueError(f"{dtype} of shape {list(shape)} does not fill whole bytes")
    return bits // 8
