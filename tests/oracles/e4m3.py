"""float8 e4m3fn and BF16 from their definitions, with nothing of quantkit or torch in it.

Bits of a code: sign, four of exponent (bias 7), three of mantissa; exponent 0 is subnormal; 0x7F and 0xFF are NaN;
there is no infinity. Source: Micikevicius et al., "FP8 Formats for Deep Learning", table 1.
"""

from __future__ import annotations

import math
import struct


def decode(code: int) -> float:
    """The number a code stands for."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def round_float32(x: float) -> float:
    """A double rounded once to float32 (nearest even)."""
    (value,) = struct.unpack("<f", struct.pack("<f", x))
    return value


def bf16_bits(x: float) -> int:
    """The BF16 bits nearest to a float32 number, ties to even; finite numbers only."""
    (bits,) = struct.unpack("<I", struct.pack("<f", x))
    lower, kept = bits & 0xFFFF, bits >> 16
    return kept + (1 if lower > 0x8000 or (lower == 0x8000 and kept & 1) else 0)
