"""Array types and the one result type of the package.

bf16 has no numpy dtype, so bf16 arrays are ``uint16`` bit patterns everywhere in this package.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
I32 = NDArray[np.int32]
F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

GROUP_SIZES = (32, 64, 128)
INT4_ZERO_SCALE = 0.0078125  # finfo(bfloat16).eps: what compressed-tensors stores for a scale of zero
FP8_ZERO_SCALE = 2.0**-23  # finfo(float32).eps: the same rule for a float32 scale
FP8_MAX = 448.0


@dataclass(frozen=True, slots=True, eq=False)
class Int4Weight:
    """A weight in group INT4 (compressed-tensors ``pack-quantized``), with what the rounding cost.

    O rows, I columns, G = I / group_size groups in a row.

    Attributes:
        packed: int32 ``[O, I/8]``; column 8w+i is nibble i (low first) of word w, stored as q + 8.
        scale: uint16 ``[O, G]``, bf16 bits.
        error: float32 ``[O, G]``, sum of (W - q * scale)^2 over the group.
        energy: float32 ``[O, G]``, sum of W^2 over the group.
    """

    packed: I32
    scale: U16
    error: F32
    energy: F32


def count_codes(packed: I32, counts: I64) -> None:
    """Add to ``counts`` ``[16]`` how many nibbles of ``packed`` (any shape) are 0 to 15, that is q + 8."""
    nibbles = np.ascontiguousarray(packed).reshape(-1).view(np.uint8)
    counts += np.bincount(nibbles & 15, minlength=16) + np.bincount(nibbles >> 4, minlength=16)


def empty_int4(rows: int, columns: int, group_size: int) -> Int4Weight:
    """Uninitialised arrays for a weight of this shape."""
    groups = columns // group_size
    return Int4Weight(
        packed=np.empty((rows, columns // 8), np.int32),
        scale=np.empty((rows, groups), np.uint16),
        error=np.empty((rows, groups), np.float32),
        energy=np.empty((rows, groups), np.float32),
    )
