"""Scales of a stored weight as float32, checked.

A scale that is NaN or infinite, and one of FP8 that is negative, can only come from damage or from a broken
quantizer, and one bad scale spoils a whole block, so it stops the work here instead of becoming a wrong weight.
INT4 has one code more below zero than above, and quantizers that use it (AutoRound) give a group whose largest
weight is positive a negative scale; every loader multiplies, so that is right. A scale of zero is right for a
block of zeros and for nothing else, so the codes under it are looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import SourceError
from .tensor import Storage, StoredWeight, TensorInfo

if TYPE_CHECKING:
    from .checkpoint import Checkpoint


def scales_float32(checkpoint: Checkpoint, weight: StoredWeight) -> npt.NDArray[np.float32]:
    """Scales as [block rows, block columns]; see ``Checkpoint.scales_float32``.

    Raises:
        ValueError: a plain weight has no scales.
        SourceError: a scale cannot be right, or ``weight_shape`` contradicts the packed tensor.
    """
    if weight.scale is None:
        raise ValueError(f"{weight.module} is stored plainly and has no scales")
    if weight.storage is Storage.INT4_GROUP:
        _check_shape(checkpoint, weight)
    rows, columns = weight.shape
    grid = (-(-rows // max(1, weight.block[0])), -(-columns // max(1, weight.block[1])))
    scales = decode_scales(checkpoint.array(weight.scale), weight.scale.dtype).reshape(grid)
    _check_values(scales, weight.scale, is_signed=weight.storage is Storage.INT4_GROUP)
    if weight.storage is not Storage.INT4_GROUP:
        _check_zeros(checkpoint, weight, scales)
    return scales


def decode_scales(raw: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float32]:
    """Exact float32 of raw scales: F32, F16, BF16 (uint16) or F8_E8M0 (uint8: 2**(code - 127), 255 is NaN)."""
    if dtype == "BF16":
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "F8_E8M0":
        bits = raw.astype(np.uint32) << np.uint32(23)
        bits[raw == 0] = 0x00400000  # 2**-127 is subnormal
        bits[raw == 255] = 0x7FC00000
        return bits.view(np.float32)
    return raw.astype(np.float32)


def _check_values(scales: npt.NDArray[np.float32], info: TensorInfo, *, is_signed: bool) -> None:
    wrong = ~np.isfinite(scales) if is_signed else ~(scales >= 0) | np.isinf(scales)
    count = int(np.count_nonzero(wrong))
    if count:
        row, column = (int(x) for x in np.argwhere(wrong)[0])
        raise SourceError(
            f"{count:,} of {scales.size:,} scales cannot be right, the first at [{row}, {column}]: "
            f"{scales[row, column]}",
            where=f"{info.file}, tensor {info.name!r}",
            accepted="finite scales" if is_signed else "finite scales, 0 or more",
            hint="The source is damaged: download the file again or take another revision.",
        )


def _check_zeros(checkpoint: Checkpoint, weight: StoredWeight, scales: npt.NDArray[np.float32]) -> None:
    """Codes under a zero scale must be zeros; reads one row of blocks at a time, and only where needed."""
    height, width = weight.block
    rows, columns = weight.shape
    for band in np.flatnonzero((scales == 0).any(axis=1)):
        top, bottom = int(band) * height, min(rows, (int(band) + 1) * height)
        raw = checkpoint.read_range(weight.weight, top * columns, bottom * columns)
        codes = np.frombuffer(raw, np.uint8).reshape(bottom - top, columns) & 0x7F
        for column in np.flatnonzero(scales[band] == 0):
            if codes[:, column * width : (column + 1) * width].any():
                raise SourceError(
                    f"scale [{band}, {column}] is zero, but the codes of {weight.weight.name} under it are not",
                    where=f"{weight.scale.file}, tensor {weight.scale.name!r}" if weight.scale else None,
                    hint="The weights of that block are lost: download the file again or take another revision.",
                )


def _check_shape(checkpoint: Checkpoint, weight: StoredWeight) -> None:
    for info in weight.extra:
        stated = checkpoint.array(info).tolist()
        if stated != list(weight.shape):
            raise SourceError(
                f"states the shape {stated}, but {weight.weight.name} of shape {list(weight.weight.shape)} "
                f"holds {list(weight.shape)}",
                where=f"{info.file}, tensor {info.name!r}",
                accepted="the shape of a 4-bit weight without padding",
            )
