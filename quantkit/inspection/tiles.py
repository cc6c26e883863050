"""Row tiles of tensors as floats, dequantized where they are the codes of a stored weight.

Weights are read by the artifact's ``RowReader``, so "the weight" means here what it means to conversion and
verification. One difference: NaN codes of FP8 weights, which conversion refuses, come out as NaN. Looking at a
damaged file is when one wants to see how many there are.

Legend: O output rows, I input columns, R rows of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..artifact.dequantize import RowReader, row_tiles
from ..checkpoint.tensor import Storage, StoredWeight, TensorInfo
from ..errors import UnsupportedError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..artifact.folds import Folds
    from ..checkpoint import Checkpoint

    Floats = NDArray[np.float32] | NDArray[np.float64]

TILE_VALUES = 1 << 22  # values of a tile: 16 MiB as float32

_NUMPY = {
    "BOOL": "u1", "U8": "u1", "I8": "i1", "I16": "<i2", "U16": "<u2", "I32": "<i4", "U32": "<u4",
    "I64": "<i8", "U64": "<u8", "F16": "<f2", "F32": "<f4", "F64": "<f8",
    "BF16": "<u2", "F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E8M0": "u1",
}  # fmt: skip


def weight_tiles(checkpoint: Checkpoint, weight: StoredWeight, folds: Folds | None = None) -> Iterator[Floats]:
    """Flat float32 values of a logical weight ``[O, I]``, tile by tile in row order.

    Args:
        folds: scales that were moved into or out of weights; they are undone.

    Raises:
        SourceError: the scales are damaged or bytes are missing.
    """
    rows, columns = weight.shape
    reader = RowReader(checkpoint, weight)
    is_fp8 = weight.storage not in (Storage.PLAIN, Storage.INT4_GROUP)
    align = weight.block[0] if weight.storage is Storage.FP8_BLOCK else 1
    for start, stop in row_tiles(rows, columns, align, TILE_VALUES):
        values = _fp8_rows(reader, start, stop) if is_fp8 else reader.float32(start, stop)
        yield (values if folds is None else folds.undo(weight.module, values, start)).reshape(-1)


def tensor_tiles(checkpoint: Checkpoint, info: TensorInfo) -> Iterator[Floats]:
    """Flat values of any tensor as stored, tile by tile; integers as float64.

    Raises:
        UnsupportedError: a dtype that is not a real number of whole bytes.
    """
    if info.dtype not in _NUMPY:
        raise UnsupportedError(f"numbers of dtype {info.dtype} cannot be shown", where=info.name)
    step = TILE_VALUES * int(_NUMPY[info.dtype][-1])
    for start in range(0, info.nbytes, step):
        yield _decode(checkpoint.read_range(info, start, min(start + step, info.nbytes)), info.dtype)


def _fp8_rows(reader: RowReader, start: int, stop: int) -> NDArray[np.float32]:
    import numpy as np

    import quantkit_kernels as kernels

    codes_RI = reader.codes(start, stop)
    nan_RI = (codes_RI & 0x7F) == 0x7F
    has_nan = bool(nan_RI.any())
    assert reader.scales is not None  # our invariant: only PLAIN has none
    clean_RI = np.where(nan_RI, np.uint8(0), codes_RI) if has_nan else codes_RI
    values_RI = kernels.fp8_to_float32(clean_RI, reader.scales, reader.weight.block, row_offset=start)
    return np.where(nan_RI, np.float32(np.nan), values_RI) if has_nan else values_RI


def _decode(raw: memoryview, dtype: str) -> Floats:
    import numpy as np

    import quantkit_kernels as kernels

    values: NDArray[Any] = np.frombuffer(raw, _NUMPY[dtype])
    if dtype == "BF16":
        return kernels.bf16_to_float32(values)
    if dtype.startswith("F8_"):
        return _fp8_values(dtype).take(values)
    if dtype in ("F16", "F32"):
        return values.astype(np.float32, copy=False)
    return values.astype(np.float64, copy=False)


def _fp8_values(dtype: str) -> NDArray[np.float32]:
    """The 256 values of an 8-bit float, by the definition of the format (OCP OFP8 and MX specifications)."""
    import numpy as np

    code = np.arange(256)
    if dtype == "F8_E8M0":
        return np.where(code == 255, np.nan, np.exp2(code.astype(np.float64) - 127)).astype(np.float32)
    mantissa_bits, bias = (3, 7) if dtype == "F8_E4M3" else (2, 15)
    exponent = (code >> mantissa_bits) & ((1 << (7 - mantissa_bits)) - 1)
    fraction = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    normal = np.exp2((exponent - bias).astype(np.float64)) * (1 + fraction)
    value = np.where(exponent == 0, np.exp2(1.0 - bias) * fraction, normal)
    if dtype == "F8_E4M3":
        value = np.where((code & 0x7F) == 0x7F, np.nan, value)
    else:
        value = np.where(exponent == 31, np.where(fraction == 0, np.inf, np.nan), value)
    return np.where(code >= 128, -value, value).astype(np.float32)
