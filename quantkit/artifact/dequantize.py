"""The float32 numbers of a stored weight, whatever it is stored as, whole or a run of rows.

One place for conversion, verification and users, so that "the weight" means the same to all of them. Numerics are
those of ``quantkit_kernels``; this only picks the operation and cuts rows so that blocks stay whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..checkpoint.tensor import Storage, StoredWeight
from ..errors import SourceError, UnsupportedError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ..checkpoint import Checkpoint


def row_tiles(rows: int, row_bytes: int, align: int, tile_bytes: int) -> Iterator[tuple[int, int]]:
    """Runs of rows of at most ``tile_bytes`` each (at least ``align`` rows), starting at multiples of ``align``."""
    step = max(tile_bytes // max(row_bytes, 1) // align * align, align)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def row_alignment(weight: StoredWeight) -> int:
    """Rows that share a scale and so belong into one tile; 1 where each row (or the whole tensor) has its own."""
    if weight.storage is Storage.FP8_BLOCK:
        return weight.block[0]
    return 1


def row_nbytes(weight: StoredWeight) -> int:
    """Stored bytes per row of the codes."""
    return weight.weight.nbytes // weight.shape[0] if weight.shape[0] else 0


class RowReader:
    """Reads rows of one stored weight; holds its decoded scales.

    ``codes(start, stop)`` are the stored numbers, ``scale_rows(start, stop)`` the scales that belong to them.
    """

    def __init__(self, checkpoint: Checkpoint, weight: StoredWeight) -> None:
        self.checkpoint, self.weight = checkpoint, weight
        self.scales = None if weight.storage is Storage.PLAIN else self._read_scales()

    def _read_scales(self) -> npt.NDArray[Any]:
        # INT4 scales stay BF16 bits: the kernels take them as stored.
        if self.weight.storage is Storage.INT4_GROUP:
            assert self.weight.scale is not None  # our invariant: only PLAIN has none
            return self.checkpoint.array(self.weight.scale)
        return self.checkpoint.scales_float32(self.weight)

    def codes(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Rows ``[start, stop)`` in their storage dtype: u8 FP8 codes, i32 packed words, u16 BF16 bits, f16, f32."""
        import numpy as np

        info, width = self.weight.weight, row_nbytes(self.weight)
        data = np.empty((stop - start) * width, dtype=np.uint8)
        self.checkpoint.read_into(info, start * width, memoryview(data))
        dtype = _STORED_AS.get(info.dtype)
        if dtype is None:
            raise UnsupportedError(f"weights of dtype {info.dtype}", where=f"{info.file}: {info.name}",
                                   accepted=", ".join(_STORED_AS))  # fmt: skip
        return data.view(dtype).reshape(stop - start, -1)

    def scale_rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        assert self.scales is not None  # our invariant: never asked for PLAIN weights
        if self.weight.storage is Storage.FP8_TENSOR:
            return self.scales.reshape(1, 1)
        block = row_alignment(self.weight)
        return self.scales[start // block : -(-stop // block)]

    def block(self, start: int, stop: int) -> tuple[int, int]:
        """The block shape that ``scale_rows`` of the same rows has."""
        if self.weight.storage is Storage.FP8_TENSOR:
            return stop - start, self.weight.shape[1]
        return self.weight.block

    def nan_error(self, start: int, row: int, column: int) -> SourceError:
        info = self.weight.weight
        return SourceError(
            f"NaN code in an FP8 weight at row {start + row}, column {column}",
            where=f"{info.file}: {info.name}",
            hint="The source is damaged: download it again, or ask its publisher",
        )

    def float32(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Rows as exact float32 numbers."""
        import numpy as np

        import quantkit_kernels as kernels

        codes = self.codes(start, stop)
        if self.weight.storage is Storage.PLAIN:
            return kernels.bf16_to_float32(codes) if codes.dtype == np.uint16 else codes.astype(np.float32, copy=False)
        scales = self.scale_rows(start, stop)
        if self.weight.storage is Storage.INT4_GROUP:
            return kernels.int4_to_float32(codes, scales, self.weight.shape[1])
        try:
            return kernels.fp8_to_float32(codes, scales, self.block(start, stop))
        except kernels.NanCodeError as problem:
            raise self.nan_error(start, problem.row, problem.column) from problem


_STORED_AS = {"F8_E4M3": "u1", "BF16": "<u2", "F16": "<f2", "F32": "<f4", "I32": "<i4"}


def dequantize(checkpoint: Checkpoint, weight: StoredWeight) -> npt.NDArray[np.float32]:
    """The whole weight as float32 ``[O, I]``; see :meth:`RowReader.float32`."""
    return RowReader(checkpoint, weight).float32(0, weight.shape[0])
