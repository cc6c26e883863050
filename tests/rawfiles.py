"""safetensors files and checkpoints byte by byte, broken on request.

numpy only, no safetensors, no quantkit: an independent hand. ``tests.builders`` has whole models.

Legend: O output features, I input features, G groups.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Raw:
    """A tensor as a file holds it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


# numbers


def e4m3_table() -> npt.NDArray[np.float32]:
    """Values of the 256 e4m3 codes from the definition (bias 7, no infinity, NaN at 0x7F and 0xFF)."""
    values = np.empty(256, np.float32)
    for code in range(256):
        exponent, mantissa = code >> 3 & 15, code & 7
        value = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
        values[code] = np.nan if code & 0x7F == 0x7F else -value if code & 0x80 else value
    return values


def to_e4m3(x: Array) -> npt.NDArray[np.uint8]:
    """Nearest e4m3 code of each value (ties to the lower code), saturating at 448."""
    positive = e4m3_table()[:127]
    middle = (positive[1:].astype(np.float64) + positive[:-1]) / 2
    codes = np.searchsorted(middle, np.abs(x).astype(np.float64), side="left").astype(np.uint8)
    return np.where(np.signbit(x), codes | 0x80, codes).astype(np.uint8)


def to_bf16(x: Array) -> npt.NDArray[np.uint16]:
    """BF16 bits, rounded to nearest even; finite values only."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: Array) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def expand(scales: Array, block: tuple[int, int], shape: tuple[int, int]) -> Array:
    """Scales repeated over their blocks, cut to the shape of the weight."""
    return np.repeat(np.repeat(scales, block[0], 0), block[1], 1)[: shape[0], : shape[1]]


# tensors


def bf16(x: Array) -> Raw:
    return Raw("BF16", tuple(x.shape), to_bf16(x).tobytes())


def f32(x: Array) -> Raw:
    return Raw("F32", tuple(x.shape), np.ascontiguousarray(x, "<f4").tobytes())


def fp8(codes: Array) -> Raw:
    return Raw("F8_E4M3", tuple(codes.shape), np.ascontiguousarray(codes, np.uint8).tobytes())


def zeros(dtype: str, shape: Iterable[int], itemsize: int) -> Raw:
    """Any dtype without meaning in its bytes."""
    dims = tuple(shape)
    return Raw(dtype, dims, bytes(itemsize * int(np.prod(dims, dtype=np.int64))))


def fp8_block(
    module: str, w: Array, block: int = 128, scale: str = "F32", part: str = "weight_scale_inv"
) -> dict[str, Raw]:
    """A weight [O, I] as e4m3 with a scale per block; ``scale`` is F32, BF16 or F8_E8M0."""
    o, i = w.shape
    grid = np.empty((-(-o // block), -(-i // block)), np.float32)
    for row in range(grid.shape[0]):
        for column in range(grid.shape[1]):
            tile = w[row * block : (row + 1) * block, column * block : (column + 1) * block]
            grid[row, column] = max(float(np.abs(tile).max()) / 448, 2.0**-20)
    if scale == "F8_E8M0":
        exponents = np.ceil(np.log2(grid)).astype(np.int32)
        grid = np.exp2(exponents).astype(np.float32)
        stored = Raw(scale, grid.shape, (exponents + 127).astype(np.uint8).tobytes())
    else:
        stored = f32(grid) if scale == "F32" else bf16(grid)
        grid = grid if scale == "F32" else from_bf16(to_bf16(grid))
    codes = to_e4m3(w / expand(grid, (block, block), (o, i)))
    return {f"{module}.weight": fp8(codes), f"{module}.{part}": stored}


def fp8_channel(module: str, w: Array) -> dict[str, Raw]:
    """A weight as e4m3 with a BF16 scale [O, 1] per row (compressed-tensors float-quantized)."""
    scale = from_bf16(to_bf16(np.maximum(np.abs(w).max(1, keepdims=True) / 448, 2.0**-20)))
    return {f"{module}.weight": fp8(to_e4m3(w / scale)), f"{module}.weight_scale": bf16(scale)}


def int4_group(module: str, w: Array, group: int = 32, shape_dtype: str = "I32") -> dict[str, Raw]:
    """A weight as compressed-tensors pack-quantized INT4 with absmax / 7, as Kimi publishes it."""
    o, i = w.shape
    grouped = w.reshape(o, i // group, group)
    scale = from_bf16(to_bf16(np.maximum(np.abs(grouped).max(2) / 7, 2.0**-20)))
    q = np.clip(np.rint(grouped / scale[:, :, None]), -8, 7).astype(np.int64).reshape(o, i)
    nibbles = (q + 8).astype(np.uint32).reshape(o, i // 8, 8)
    packed = (nibbles << (4 * np.arange(8, dtype=np.uint32))).sum(2, dtype=np.uint32)
    return {
        f"{module}.weight_packed": Raw("I32", (o, i // 8), packed.astype("<u4").tobytes()),
        f"{module}.weight_scale": bf16(scale),
        f"{module}.weight_shape": Raw(
            shape_dtype, (2,), np.array([o, i], "<i4" if shape_dtype == "I32" else "<i8").tobytes()
        ),
    }


# files


def header_of(tensors: Mapping[str, Raw], metadata: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The header of a well-formed file that holds the tensors in this order."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    position = 0
    for name, tensor in tensors.items():
        end = position + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    return header


def raw_bytes(header: Mapping[str, Any] | str | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A file with any header (a string or bytes stand as they are) and any length field."""
    if isinstance(header, Mapping):
        header = json.dumps(header, separators=(",", ":"), ensure_ascii=False)
    text = header.encode() if isinstance(header, str) else header
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def file_bytes(tensors: Mapping[str, Raw], metadata: Mapping[str, str] | None = None) -> bytes:
    header = json.dumps(header_of(tensors, metadata), separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    return raw_bytes(header, b"".join(tensor.data for tensor in tensors.values()))


def write_file(path: Path, tensors: Mapping[str, Raw], metadata: Mapping[str, str] | None = None) -> Path:
    path.write_bytes(file_bytes(tensors, metadata))
    return path


def write_raw(
    path: Path, header: Mapping[str, Any] | str | bytes, data: bytes = b"", length: int | None = None
) -> Path:
    """A file that may be broken; see ``raw_bytes``."""
    path.write_bytes(raw_bytes(header, data, length))
    return path


def write_index(folder: Path, weight_map: Mapping[str, str], total_size: int = 0) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": total_size}, "weight_map": dict(weight_map)}, indent=1))
    return path


def write_checkpoint(
    folder: Path,
    tensors: Mapping[str, Raw],
    config: Mapping[str, Any] | None = None,
    *,
    shards: int | Mapping[str, Iterable[str]] = 1,
    index: bool | None = None,
    file_name: str = "model-{number:05d}-of-{count:05d}.safetensors",
    first: int = 1,
    side_files: Mapping[str, bytes] | None = None,
) -> Path:
    """A checkpoint on disk.

    Args:
        folder: made if needed.
        tensors: in file order.
        config: content of config.json, none when None.
        shards: number of files (runs of tensors of about equal count), or file name to tensor names.
        index: write the index; by default when there are several files.
        file_name, first: naming of numbered shards; one file is ``model.safetensors``.
        side_files: name to content.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    if isinstance(shards, int):
        if shards == 1:
            layout = {"model.safetensors": names}
        else:
            cuts = [len(names) * k // shards for k in range(shards + 1)]
            layout = {
                file_name.format(number=k + first, count=shards): names[cuts[k] : cuts[k + 1]]
                for k in range(shards)
            }
    else:
        layout = {file: list(members) for file, members in shards.items()}
    for file, members in layout.items():
        write_file(folder / file, {name: tensors[name] for name in members}, {"format": "pt"})
    if index or (index is None and len(layout) > 1):
        weight_map = {name: file for file, members in layout.items() for name in members}
        write_index(folder, weight_map, sum(len(t.data) for t in tensors.values()))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config, indent=2))
    for name, content in (side_files or {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder
