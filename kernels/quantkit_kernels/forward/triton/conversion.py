"""The conversions on a GPU: backend ``triton``, numpy in and out, with the bits of the torch twin.

Arrays are copied to the device in tiles of rows and back, so device memory is bounded. A NaN that is kept (a scale
of NaN gives NaN) may have other bits than the twin's: processors differ in what a product of NaN is.

With TRITON_INTERPRET=1 everything runs in host memory, for tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantkit_kernels.errors import NanCodeError, NonFiniteError
from quantkit_kernels.search import Method
from quantkit_kernels.types import F32, I32, I64, U8, U16, Int4Weight, count_codes, empty_int4

from .kernels import conversion as kernels
from .launch import ceil_div, is_interpreted, launch

TILE_ELEMENTS = 1 << 26
BLOCK = 1024
_NO_PLACE = 2**63 - 1


class TritonBackend:
    """Backend ``triton``. Arguments are checked by ``ops``.

    Args:
        device: where to compute; default the current CUDA device, host memory in the interpreter.

    Raises:
        ValueError: there is no CUDA device and the interpreter is off.
    """

    name = "triton"

    def __init__(self, device: torch.device | None = None) -> None:
        is_missing = device is None and not is_interpreted() and not torch.cuda.is_available()
        if is_missing:
            raise ValueError("the triton backend needs a CUDA device; TRITON_INTERPRET=1 does without one, slowly")
        self._device = device or torch.device("cpu" if is_interpreted() else "cuda")

    def fp8_to_float32(self, codes: U8, scales: F32, block: tuple[int, int], row_offset: int) -> F32:
        out = np.empty(codes.shape, np.float32)
        self._fp8_to_plain(codes, scales, block, row_offset, out)
        return out

    def fp8_to_bf16(self, codes: U8, scales: F32, block: tuple[int, int], row_offset: int) -> U16:
        out = np.empty(codes.shape, np.uint16)
        self._fp8_to_plain(codes, scales, block, row_offset, out)
        return out

    def fp8_to_int4(
        self,
        codes: U8,
        scales: F32,
        block: tuple[int, int],
        row_offset: int,
        group_size: int,
        method: Method,
        counts: I64 | None = None,
    ) -> Int4Weight:
        out = empty_int4(codes.shape[0], codes.shape[1], group_size)
        grid = self._to(scales)
        for rows in _tiles(codes.shape):
            self._quantize(out, rows, codes, "fp8", grid, block, row_offset + rows.start, group_size, method, None)
        if counts is not None:
            count_codes(out.packed, counts)
        return out

    def float_to_int4(
        self,
        weight: F32 | U16,
        row_offset: int,
        group_size: int,
        method: Method,
        importance: F32 | None = None,
        counts: I64 | None = None,
    ) -> Int4Weight:
        out = empty_int4(weight.shape[0], weight.shape[1], group_size)
        kind = "bf16" if weight.dtype == np.uint16 else "float32"
        none = self._to(np.zeros((1, 1), np.float32))
        for rows in _tiles(weight.shape):
            at = row_offset + rows.start
            self._quantize(out, rows, weight, kind, none, (1, 1), at, group_size, method, importance)
        if counts is not None:
            count_codes(out.packed, counts)
        return out

    def int4_to_float32(self, packed: I32, scale: U16, columns: int, group_size: int) -> F32:
        out = np.empty((packed.shape[0], columns), np.float32)
        self._int4_to_plain(packed, scale, group_size, out)
        return out

    def int4_to_bf16(self, packed: I32, scale: U16, columns: int, group_size: int) -> U16:
        out = np.empty((packed.shape[0], columns), np.uint16)
        self._int4_to_plain(packed, scale, group_size, out)
        return out

    def float_to_fp8(self, weight: F32 | U16, row_offset: int, block: tuple[int, int]) -> tuple[U8, F32]:
        (rows, columns), (block_rows, block_columns) = weight.shape, block
        codes = np.empty((rows, columns), np.uint8)
        scales = np.empty((ceil_div(rows, block_rows), ceil_div(columns, block_columns)), np.float32)
        step = max(1, TILE_ELEMENTS // max(columns * block_rows, 1)) * block_rows  # whole blocks
        for start in range(0, rows, step):
            part = weight[start : start + step]
            source, bad = self._to(part), self._no_place()
            bands = slice(start // block_rows, ceil_div(start + part.shape[0], block_rows))
            grid = self._empty(scales[bands])
            size, is_bf16 = (*part.shape, *block), weight.dtype == np.uint16
            launch(
                kernels.block_scales_kernel, tuple(grid.shape), source, columns, grid, bad, *size, BF16=is_bf16,
                BLOCK=128,
            )  # fmt: skip
            _refuse(bad, part, row_offset + start)
            out = self._empty(part, torch.uint8)
            launch(
                kernels.encode_kernel, (ceil_div(part.size, BLOCK),), source, columns, grid, scales.shape[1], out,
                *size, BF16=is_bf16, BLOCK=BLOCK,
            )  # fmt: skip
            codes[start : start + step], scales[bands] = _numpy(out), _numpy(grid)
        return codes, scales

    def bf16_to_float32(self, bits: U16) -> F32:
        out = np.empty(bits.shape, np.float32)
        for part in _tiles((bits.size, 1)):
            target = self._empty(out[part])
            grid = (ceil_div(target.numel(), BLOCK),)
            launch(kernels.widen_kernel, grid, self._to(bits[part]), target, target.numel(), BLOCK=BLOCK)
            out[part] = _numpy(target)
        return out

    def float32_to_bf16(self, values: F32) -> U16:
        out = np.empty(values.shape, np.uint16)
        for part in _tiles((values.size, 1)):
            target = self._empty(out[part])
            grid = (ceil_div(target.numel(), BLOCK),)
            launch(kernels.narrow_kernel, grid, self._to(values[part]), target, target.numel(), BLOCK=BLOCK)
            out[part] = _numpy(target)
        return out

    def _fp8_to_plain(
        self, codes: U8, scales: F32, block: tuple[int, int], row_offset: int, out: F32 | U16
    ) -> None:
        grid, columns = self._to(scales), codes.shape[1]
        for rows in _tiles(codes.shape):
            tile, target, bad = self._to(codes[rows]), self._empty(out[rows]), self._no_place()
            launch(
                kernels.fp8_to_plain_kernel, (ceil_div(tile.numel(), BLOCK),), tile, columns, grid,
                scales.shape[1], target, bad, *tile.shape, row_offset + rows.start, *block,
                BF16=out.dtype == np.uint16, BLOCK=BLOCK,
            )  # fmt: skip
            _refuse(bad, codes[rows], row_offset + rows.start)
            out[rows] = _numpy(target)

    def _quantize(
        self,
        out: Int4Weight,
        rows: slice,
        weight: U8 | F32 | U16,
        kind: str,
        grid: Tensor,
        block: tuple[int, int],
        first_row: int,
        group_size: int,
        method: Method,
        importance: F32 | None,
    ) -> None:
        source, bad, factors = self._to(weight[rows]), self._no_place(), self._to(method.factors)
        counts = factors if importance is None else self._to(importance)
        groups = BLOCK // group_size  # of a program
        parts: tuple[NDArray[Any], ...] = (out.packed, out.scale, out.error, out.energy)
        targets = [self._empty(part[rows]) for part in parts]
        launch(
            kernels.to_int4_kernel, (ceil_div(targets[1].numel(), groups),), source, weight.shape[1], grid,
            grid.shape[1], factors, counts, *targets, bad, *source.shape, first_row, *block, method.factors.size,
            KIND=kind, UNBIASED=method.is_unbiased and importance is None, WEIGHTED=importance is not None,
            GROUP=group_size, BLOCK=groups,
        )  # fmt: skip
        _refuse(bad, weight[rows], first_row)
        for part, target in zip(parts, targets, strict=True):
            part[rows] = _numpy(target)

    def _int4_to_plain(self, packed: I32, scale: U16, group_size: int, out: F32 | U16) -> None:
        for rows in _tiles(out.shape):
            words, scales, target = self._to(packed[rows]), self._to(scale[rows]), self._empty(out[rows])
            launch(
                kernels.int4_to_plain_kernel, (ceil_div(target.numel(), BLOCK),), words, words.shape[1], scales,
                scales.shape[1], target, *target.shape, group_size, BF16=out.dtype == np.uint16, BLOCK=BLOCK,
            )  # fmt: skip
            out[rows] = _numpy(target)

    def _to(self, array: NDArray[Any]) -> Tensor:
        """A contiguous copy on the device; uint16 stays uint16."""
        return torch.from_numpy(np.array(array)).to(self._device)

    def _empty(self, like: NDArray[Any], dtype: torch.dtype | None = None) -> Tensor:
        kinds = {np.uint8: torch.uint8, np.uint16: torch.uint16, np.int32: torch.int32, np.float32: torch.float32}
        return torch.empty(like.shape, dtype=dtype or kinds[like.dtype.type], device=self._device)

    def _no_place(self) -> Tensor:
        return torch.full((1,), _NO_PLACE, dtype=torch.int64, device=self._device)


def _tiles(shape: tuple[int, ...]) -> Iterator[slice]:
    rows, columns = shape
    step = max(1, TILE_ELEMENTS // max(columns, 1))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _numpy(tensor: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = tensor.cpu().numpy()
    return array


def _refuse(bad: Tensor, source: NDArray[Any], first_row: int) -> None:
    """Raise for the first bad number of a tile, if there is one."""
    place = int(bad.item())
    if place != _NO_PLACE:
        row, column = divmod(place, source.shape[1])
        _raise(source, row, column, first_row)


def _raise(source: NDArray[Any], row: int, column: int, first_row: int) -> NoReturn:
    is_nan_code = source.dtype == np.uint8 and int(source[row, column]) & 0x7F == 0x7F
    raise (NanCodeError if is_nan_code else NonFiniteError)(first_row + row, column)
