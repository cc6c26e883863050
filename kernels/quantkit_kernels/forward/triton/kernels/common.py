"""Numbers on the device: casts that round as the twins do, FP8 and INT4 decoding, the product on tensor cores.

Triton's interpreter keeps bfloat16 as integers: its ``dot`` multiplies the bit patterns, its casts truncate. Where
that matters there are two branches, chosen when a kernel is built; both give the same numbers.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def bf16_to_float(x):
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def float_to_bf16_bits(x):
    """Nearest even as uint16; a NaN becomes quiet and keeps sign and upper payload."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits >> 16) | 0x0040, rounded).to(tl.uint16)


@triton.jit
def float_to_bf16(x):
    if INTERPRETED:
        y = float_to_bf16_bits(x).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(tl.bfloat16)
    return y


@triton.jit
def fp8_to_float(codes):
    """uint8 e4m3 codes to float32, exactly: subnormals and NaN included."""
    if INTERPRETED:
        wide = codes.to(tl.uint32)
        bits = ((wide & 0x7F) << 20) | ((wide & 0x80) << 24)
        y = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120 moves the bias from 7 to 127
        y = tl.where((wide & 0x7F) == 0x7F, float("nan"), y)
    else:
        y = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return y


@triton.jit
def float_to_fp8(x):
    """float32 in [-448, 448] to e4m3 codes as uint8, nearest even."""
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960  # 8 * (127 - 7)
    # 2^14 has steps of 2^-9, those of an e4m3 subnormal: the addition rounds.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, normal)  # below 2^-6
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def fp8_to_bf16(codes):
    return float_to_bf16(fp8_to_float(codes))  # exact: e4m3 has fewer bits and a smaller range


@triton.jit
def nibble_to_bf16(nibble):
    """0..15 to bf16 nibble - 8, exactly: or-ed into the last bits of 2^23, no conversion instruction."""
    value = (nibble.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0
    return (value.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def dot(a, b, c):
    """c + a b of bf16 a and b, float32 c."""
    if INTERPRETED:
        d = tl.dot(bf16_to_float(a), bf16_to_float(b), c, input_precision="ieee")
    else:
        d = tl.dot(a, b, c)
    return d


@triton.jit
def is_finite(x):
    return (x.to(tl.uint32, bitcast=True) & 0x7F800000) != 0x7F800000


@triton.jit
def request_of(starts, requests, row, STEP: tl.constexpr):
    """The largest r with starts[r] // STEP + r * (STEP > 1) <= row, by bisection: which request a tile of STEP
    queries, or with STEP 1 a query, belongs to. Tiles of a request are numbered from that bound on, which leaves
    gaps but needs no prefix sums.
    """
    low = tl.load(starts) * 0
    high = low + requests
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(starts + middle) // STEP
        if STEP > 1:
            first += middle
        is_right = first <= row
        low = tl.where(is_right, middle, low)
        high = tl.where(is_right, high, middle)
    return low
