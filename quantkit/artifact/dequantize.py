"""The float32 numbers of a stored weight, whatever it is stored as, whole or a run of rows.

One place for conversion, verification and users, so that "the weight" means the same to all of them. Numerics are
those of ``quantkit_kernels``; this only picks the operation and cuts rows so that blocks stay whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..checkpoint.tensor import Storage, StoredWeight, TensorInfo
from ..errors import SourceError, UnsupportedError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ..checkpoint import Checkpoint


_DAMAGED = "The source is damaged: download it again, or ask its publisher"


def row_tiles(rows: int, row_bytes: int, align: int, tile_bytes: int) -> Iterator[tuple[int, int]]:
    """Runs of at most ``tile_bytes`` (but at least ``align`` rows), starting at multiples of ``align``."""
    step = max(tile_bytes // max(row_bytes, 1) // align * align, align)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def row_nbytes(weight: StoredWeight) -> int:
    """Stored bytes per row of the codes."""
    return weight.weight.nbytes // weight.shape[0] if weight.shape[0] else 0


class RowReader:
    """Reads rows of one stored weight; holds its decoded scales.

    Attributes:
        weight: the weight.
        scales: None for PLAIN; BF16 bits ``[O, G]`` for INT4 (the kernels take them as stored), else float32.
    """

    def __init__(self, checkpoint: Checkpoint, weight: StoredWeight) -> None:
        self.weight = weight
        self._checkpoint = checkpoint
        self.scales: npt.NDArray[Any] | None = None
        if weight.storage is not Storage.PLAIN:
            self.scales = _read_scales(checkpoint, weight)

    def codes(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Rows ``[start, stop)`` as stored: u8 FP8 codes, i32 packed words, u16 BF16 bits, f16, f32."""
        import numpy as np

        info, width = self.weight.weight, row_nbytes(self.weight)
        if info.dtype not in _STORED_AS:
            raise UnsupportedError(
                f"a weight of dtype {info.dtype}", where=_where(info), accepted=", ".join(_STORED_AS)
            )
        data = np.empty((stop - start) * width, dtype=np.uint8)
        self._checkpoint.read_into(info, start * width, data.data)
        return data.view(_STORED_AS[info.dtype]).reshape(stop - start, -1)

    def scale_rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Scales of rows of an INT4 weight; the others go to the kernels whole, with a row offset."""
        assert self.scales is not None  # our invariant: only PLAIN has none
        return self.scales[start:stop]

    def float32(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Rows as exact float32 numbers."""
        import numpy as np

        import quantkit_kernels as kernels

        codes = self.codes(start, stop)
        if self.weight.storage is Storage.PLAIN:
            return (
                kernels.bf16_to_float32(codes)
                if codes.dtype == np.uint16
                else codes.astype(np.float32, copy=False)
            )
        if self.weight.storage is Storage.INT4_GROUP:
            return kernels.int4_to_float32(
                codes, self.scale_rows(start, stop), self.weight.shape[1], group_size=self.weight.block[1]
            )
        assert self.scales is not None  # our invariant: only PLAIN has none
        with self.bad_numbers():
            return kernels.fp8_to_float32(codes, self.scales, self.weight.block, row_offset=start)

    @contextmanager
    def bad_numbers(self) -> Iterator[None]:
        """Name the tensor in what the kernels say of a NaN code or a number that is not finite."""
        import quantkit_kernels as kernels

        try:
            yield
        except kernels.NanCodeError as problem:
            raise nan_code_error(self.weight.weight, problem.row, problem.column) from problem
        except kernels.NonFiniteError as problem:
            raise SourceError(
                f"NaN or infinity at row {problem.row}, column {problem.column}",
                where=_where(self.weight.weight), hint=_DAMAGED,
            ) from problem  # fmt: skip


def nan_code_error(info: TensorInfo, row: int, column: int) -> SourceError:
    """An FP8 weight with a NaN code, named."""
    return SourceError(
        f"NaN code in an FP8 weight at row {row}, column {column}", where=_where(info), hint=_DAMAGED
    )


def _read_scales(checkpoint: Checkpoint, weight: StoredWeight) -> npt.NDArray[Any]:
    if weight.storage is not Storage.INT4_GROUP:
        return checkpoint.scales_float32(weight)
    assert weight.scale is not None  # our invariant: only PLAIN has none
    if weight.scale.dtype != "BF16":
        raise UnsupportedError(
            f"INT4 scales of dtype {weight.scale.dtype}", where=_where(weight.scale), accepted="BF16"
        )
    checkpoint.scales_float32(weight)  # for its checks: no NaN or infinite scale
    return checkpoint.array(weight.scale)


def _where(info: TensorInfo) -> str:
    return f"{info.file}: {info.name}"


_STORED_AS = {"F8_E4M3": "u1", "BF16": "<u2", "F16": "<f2", "F32": "<f4", "I32": "<i4"}


def dequantize(checkpoint: Checkpoint, weight: StoredWeight) -> npt.NDArray[np.float32]:
    """The whole weight as float32 ``[O, I]``; see :meth:`RowReader.float32`."""
    return RowReader(checkpoint, weight).float32(0, weight.shape[0])
