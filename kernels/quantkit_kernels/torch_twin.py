"""The reference twin in plain vectorised torch: the specification of every operation, and the fallback.

Every step is one elementwise IEEE float32 operation, so that any backend can give the same bits: no fused
multiply-add, no reciprocal, sums in a fixed order. Rows are processed in tiles to bound memory. torch is imported
by the first call, not by the module: it takes 285 MiB and a second, and the native backend does without.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .errors import NanCodeError, NonFiniteError
from .search import Method
from .types import (
    F32,
    FP8_MAX,
    FP8_ZERO_SCALE,
    I32,
    I64,
    INT4_ZERO_SCALE,
    U8,
    U16,
    Int4Weight,
    count_codes,
    empty_int4,
)

if TYPE_CHECKING:
    from torch import Tensor

TILE_ELEMENTS = 1 << 18  # a few MiB of temporaries: stays in the last-level cache


class TorchTwin:
    """Backend ``torch``. Arguments are checked by ``ops``."""

    name = "torch"

    def fp8_to_float32(self, codes: U8, scales: F32, block: tuple[int, int], row_offset: int) -> F32:
        out = np.empty(codes.shape, np.float32)
        for rows in _tiles(codes.shape):
            tile = codes[rows]
            _refuse(row_offset + rows.start, _is_nan_code(tile), None)
            out[rows] = _product(tile, scales, block, row_offset + rows.start).numpy()
        return out

    def fp8_to_bf16(self, codes: U8, scales: F32, block: tuple[int, int], row_offset: int) -> U16:
        out = np.empty(codes.shape, np.uint16)
        for rows in _tiles(codes.shape):
            tile = codes[rows]
            _refuse(row_offset + rows.start, _is_nan_code(tile), None)
            out[rows] = _to_bf16_bits(_product(tile, scales, block, row_offset + rows.start)).numpy()
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
        for rows in _tiles(codes.shape):
            weight = _product(codes[rows], scales, block, row_offset + rows.start)
            _refuse(row_offset + rows.start, _is_nan_code(codes[rows]), weight)
            _quantize_into(out, rows, weight, group_size, method)
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
        for rows in _tiles(weight.shape):
            tile = _plain(weight[rows])
            _refuse(row_offset + rows.start, None, tile)
            _quantize_into(out, rows, tile, group_size, method, importance)
        if counts is not None:
            count_codes(out.packed, counts)
        return out

    def int4_to_float32(self, packed: I32, scale: U16, columns: int, group_size: int) -> F32:
        out = np.empty((packed.shape[0], columns), np.float32)
        for rows in _tiles(out.shape):
            out[rows] = _unpacked(packed[rows], scale[rows], columns, group_size).numpy()
        return out

    def int4_to_bf16(self, packed: I32, scale: U16, columns: int, group_size: int) -> U16:
        out = np.empty((packed.shape[0], columns), np.uint16)
        for rows in _tiles(out.shape):
            out[rows] = _to_bf16_bits(_unpacked(packed[rows], scale[rows], columns, group_size)).numpy()
        return out

    def float_to_fp8(self, weight: F32 | U16, row_offset: int, block: tuple[int, int]) -> tuple[U8, F32]:
        o, i = weight.shape
        bo, bi = block[0], min(block[1], max(i, 1))
        codes = np.empty((o, i), np.uint8)
        scales = np.empty((-(-o // bo), -(-i // bi)), np.float32)
        for band, start in enumerate(range(0, o, bo)):
            tile = _plain(weight[start : start + bo])
            _refuse(row_offset + start, None, tile)
            scale = _block_scales(tile, bi)
            scales[band] = scale.numpy()
            codes[start : start + bo] = _encode(tile, scale.repeat_interleave(bi)[:i]).numpy()
        return codes, scales

    def bf16_to_float32(self, bits: U16) -> F32:
        out = np.empty(bits.shape, np.float32)
        for part in _tiles((bits.size, 1)):
            out[part] = _from_bf16_bits(bits[part]).numpy()
        return out

    def float32_to_bf16(self, values: F32) -> U16:
        out = np.empty(values.shape, np.uint16)
        for part in _tiles((values.size, 1)):
            out[part] = _to_bf16_bits(_tensor(values[part])).numpy()
        return out


def _tiles(shape: tuple[int, ...]) -> Iterator[slice]:
    rows, columns = shape
    step = max(1, TILE_ELEMENTS // max(columns, 1))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _tensor(array: NDArray[Any]) -> Tensor:
    import torch

    return torch.from_numpy(np.array(array))  # a copy of the tile: sources are often read-only


def _plain(weight: F32 | U16) -> Tensor:
    return _from_bf16_bits(weight) if weight.dtype == np.uint16 else _tensor(weight)


def _from_bf16_bits(bits: NDArray[Any]) -> Tensor:
    import torch

    return (_tensor(bits.view(np.int16)).to(torch.int32) << 16).view(torch.float32)


def _to_bf16_bits(x: Tensor) -> Tensor:
    """Nearest even by integers: torch's own cast gives a NaN 0xFFFF or 0x7FC0, by its place in the tensor."""
    import torch

    bits = x.contiguous().view(torch.int32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x0040
    return torch.where(torch.isnan(x), quiet, rounded).to(torch.int16).view(torch.uint16)


def _is_nan_code(codes: U8) -> NDArray[np.bool_]:
    is_nan: NDArray[np.bool_] = (codes & 0x7F) == 0x7F
    return is_nan


def _refuse(first_row: int, is_nan: NDArray[np.bool_] | None, weight: Tensor | None) -> None:
    """Raise for the first NaN code or non-finite number in row-major order, if there is one."""
    import torch

    bad = is_nan if weight is None else ~torch.isfinite(weight).numpy()
    if bad is None or not bad.any():
        return
    row, column = divmod(int(np.argmax(bad)), bad.shape[1])  # a NaN code is a non-finite product too
    error = NanCodeError if is_nan is not None and is_nan[row, column] else NonFiniteError
    raise error(first_row + row, column)


def _product(codes: U8, scales: F32, block: tuple[int, int], first_row: int) -> Tensor:
    """float32(code) * float32(scale) of a tile that starts at ``first_row`` of the whole weight."""
    import torch

    o, i = codes.shape
    bands = (first_row + np.arange(o)) // block[0]
    grid = _tensor(scales[bands]) if o else torch.empty(0, scales.shape[1])
    spread = grid.repeat_interleave(min(block[1], max(i, 1)), dim=1)[:, :i]  # [O, I]
    return _tensor(codes).view(torch.float8_e4m3fn).to(torch.float32) * spread


def _fold(x: Tensor) -> Tensor:
    """Sum over the last dimension (a power of two): the upper half onto the lower half until one is left."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def _codes_of(w: Tensor, s: Tensor) -> Tensor:
    """q in [-8, 7] as float32; w ``[O, G, group]``, s ``[O, G]``."""
    import torch

    return torch.round(w / s.unsqueeze(-1)).clamp(-8, 7)


def _squared_error(w: Tensor, s: Tensor, q: Tensor, importance: Tensor | None = None) -> Tensor:
    d = w - s.unsqueeze(-1) * q
    return _fold(d * d if importance is None else d * d * importance)


def _unbiased(w: Tensor, s: Tensor, q: Tensor) -> Tensor:
    """The bf16 scale with which codes q, those of s, project onto w with gain 1; s where all q are 0."""
    import torch

    t = w / s.unsqueeze(-1)
    overlap = _fold(q * t)
    gain = _fold(t * t) / overlap
    return torch.where(overlap > 0, _from_bf16_bits(_to_bf16_bits(s * gain).numpy()), s)


def _candidate(base: Tensor, factor: float) -> Tensor:
    """bf16_rne(base * factor) as float32, INT4_ZERO_SCALE where that is zero."""
    import torch

    s = _from_bf16_bits(_to_bf16_bits(base * torch.full_like(base, factor)).numpy())
    return torch.where(s == 0, torch.full_like(s, INT4_ZERO_SCALE), s)


def _quantize_into(
    out: Int4Weight, rows: slice, weight: Tensor, group_size: int, method: Method, importance: F32 | None = None
) -> None:
    import torch

    counts = None if importance is None else _tensor(importance).reshape(-1, group_size)  # [G, group]
    w = weight.reshape(weight.shape[0], -1, group_size)  # [O, G, group]
    absmax = w.abs().amax(dim=-1) if w.numel() else w.new_empty(w.shape[:2])
    base = absmax / torch.full_like(absmax, 7.5)
    scale = _candidate(base, float(method.factors[0]))
    error = first_error = _squared_error(w, scale, _codes_of(w, scale), counts)
    for factor in method.factors[1:]:
        candidate = _candidate(base, float(factor))
        trial = _squared_error(w, candidate, _codes_of(w, candidate), counts)
        is_better = trial < error
        scale, error = torch.where(is_better, candidate, scale), torch.where(is_better, trial, error)
    q = _codes_of(w, scale)
    if counts is not None:
        error = _squared_error(w, scale, q)
    elif method.is_unbiased:
        unbiased = _unbiased(w, scale, q)
        trial = _squared_error(w, unbiased, q)
        is_kept = trial <= first_error
        scale, error = torch.where(is_kept, unbiased, scale), torch.where(is_kept, trial, error)
    nibbles = q.to(torch.int32).reshape(weight.shape[0], -1, 8) + 8
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    out.packed[rows] = (nibbles << shifts).sum(dim=-1, dtype=torch.int32).numpy()
    out.scale[rows] = _to_bf16_bits(scale).numpy()
    out.error[rows] = error.numpy()
    out.energy[rows] = _fold(w * w).numpy()


def _unpacked(packed: I32, scale: U16, columns: int, group_size: int) -> Tensor:
    import torch

    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    words = _tensor(packed).unsqueeze(-1)  # [O, words, 1]
    q = (((words >> shifts) & 15) - 8).reshape(packed.shape[0], -1)[:, :columns].to(torch.float32)
    spread = _from_bf16_bits(scale).repeat_interleave(min(group_size, max(columns, 1)), dim=1)[:, :columns]
    return q * spread


def _block_scales(band: Tensor, block_columns: int) -> Tensor:
    """One float32 scale per block of a band of rows."""
    import torch

    columns = band.abs().amax(dim=0) if band.numel() else band.new_zeros(band.shape[1])
    pad = -columns.shape[0] % min(block_columns, max(columns.shape[0], 1))
    padded = torch.nn.functional.pad(columns, (0, pad))
    absmax = (
        padded.reshape(-1, min(block_columns, max(columns.shape[0], 1))).amax(dim=1) if band.numel() else columns
    )
    scale = absmax / torch.full_like(absmax, FP8_MAX)
    return torch.where(scale == 0, torch.full_like(scale, FP8_ZERO_SCALE), scale)


def _encode(w: Tensor, scale: Tensor) -> Tensor:
    """e4m3 codes; clamped first because older torch casts overflow to NaN instead of saturating."""
    import torch

    return (w / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
