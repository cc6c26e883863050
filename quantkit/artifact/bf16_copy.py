"""A BF16 copy of a checkpoint or view, made by our own kernels, that transformers loads as an ordinary model.

Why a copy on disk: transformers 5.17 dequantizes FP8 block weights with a block size that it derives from shapes,
which is wrong wherever a block is partial (docs/format.md, "An oracle that is wrong"). With the copy, FP8 and INT4
weights are judged in the same BF16 arithmetic by code that neither of us wrote, and no activation is quantized.

FP8 (block, channel, tensor) and INT4 weights become ``bf16(code * scale)``; everything else is copied byte for
byte, F32 tensors included. Scales and ``quantization_config`` go; layers beyond ``num_hidden_layers`` (multi-token
prediction) go too, since transformers has no place for them. Tensors are streamed one by one, plain ones in
pieces.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ..checkpoint.tensor import Storage, StoredWeight, TensorInfo
from ..errors import UnsupportedError, UsageError
from ..safetensors_header import render_header
from ..scheme import OutputTensor
from .dequantize import RowReader

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..checkpoint import Checkpoint

INDEX = "model.safetensors.index.json"
COPY_BYTES = 16 << 20
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def write_bf16_copy(source: str | PathLike[str] | Checkpoint, out: str | PathLike[str]) -> Path:
    """Write the BF16 copy of ``source`` into the new or empty directory ``out``.

    Args:
        source: an open checkpoint, or what ``open_checkpoint`` takes (directory of a view, bundled name, Hub id).
        out: target directory.

    Returns:
        ``out``, a directory in the Hugging Face layout with the file names of the source.

    Raises:
        UsageError: ``out`` exists and is not empty.
        SourceError: the source is incomplete or corrupt.
    """
    from ..checkpoint import Checkpoint, open_checkpoint

    if not isinstance(source, Checkpoint):
        with open_checkpoint(source) as checkpoint:
            return write_bf16_copy(checkpoint, out)
    target = Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError("exists and is not empty", where=str(target), accepted="a new or empty directory")
    target.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for file, entries in _contents(source).items():
        outputs = [entry[0] for entry in entries]
        with (target / file).open("wb") as f:
            f.write(render_header(outputs))
            for _, origin in entries:
                _write(source, origin, f)
        weight_map |= {t.name: file for t in outputs}
        total_bytes += sum(t.nbytes for t in outputs)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    (target / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    (target / "config.json").write_text(json.dumps(plain_config(source.config), indent=1) + "\n", encoding="utf-8")
    for side in source.side_files:
        if side.name not in ("config.json", INDEX):
            path = target / side.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(source.side_bytes(side.name))
    return target


def bf16_copy_bytes(source: Checkpoint) -> int:
    """Tensor bytes of the copy that ``write_bf16_copy`` makes; headers are read, no data."""
    return sum(tensor.nbytes for entries in _contents(source).values() for tensor, _ in entries)


def plain_config(config: dict[str, Any]) -> dict[str, Any]:
    """``config.json`` of a BF16 model: without quantization_config, at the top and in ``text_config``."""
    plain = {k: v for k, v in config.items() if k not in ("quantization_config", "compression_config")}
    if isinstance(plain.get("text_config"), dict):
        plain["text_config"] = plain_config(plain["text_config"])
    plain["dtype"] = "bfloat16"
    plain.pop("torch_dtype", None)
    return plain


def dequantize_bf16(checkpoint: Checkpoint, weight: StoredWeight) -> NDArray[np.uint16]:
    """A quantized weight as BF16 bits ``[O, I]``, by the kernels that conversion uses.

    Raises:
        UnsupportedError: the weight is plain, there is nothing to dequantize.
        SourceError: a NaN code, or a scale that cannot be right.
    """
    import quantkit_kernels as kernels

    if weight.storage is Storage.PLAIN:
        raise UnsupportedError("not a quantized weight", where=weight.module)
    reader = RowReader(checkpoint, weight)
    scales = reader.scales
    assert scales is not None  # our invariant: only PLAIN has none
    codes = reader.codes(0, weight.shape[0])
    if weight.storage is Storage.INT4_GROUP:
        return kernels.int4_to_bf16(codes, scales, weight.shape[1], group_size=weight.block[1])
    with reader.bad_numbers():
        return kernels.fp8_to_bf16(codes, scales, weight.block)


def _contents(source: Checkpoint) -> dict[str, list[tuple[OutputTensor, StoredWeight | TensorInfo]]]:
    """File -> tensors of the copy in source order, each with what it is made of."""
    quantized = {m: w for m, w in source.weights().items() if w.storage is not Storage.PLAIN}
    by_codes = {w.weight.name: w for w in quantized.values()}
    consumed = {part.name for w in quantized.values() for part in w.parts}
    text = source.config.get("text_config", source.config)
    num_layers = text.get("num_hidden_layers")
    files: dict[str, list[tuple[OutputTensor, StoredWeight | TensorInfo]]] = defaultdict(list)
    for info in source.tensors.values():
        layer = _LAYER.search(info.name)
        if layer and num_layers is not None and int(layer[1]) >= num_layers:
            continue
        if weight := by_codes.get(info.name):
            files[info.file].append((OutputTensor(f"{weight.module}.weight", "BF16", weight.shape), weight))
        elif info.name not in consumed:
            files[info.file].append((OutputTensor(info.name, info.dtype, info.shape), info))
    return files


def _write(source: Checkpoint, origin: StoredWeight | TensorInfo, f: BinaryIO) -> None:
    if isinstance(origin, StoredWeight):
        f.write(dequantize_bf16(source, origin).tobytes())
        return
    for start in range(0, origin.nbytes, COPY_BYTES):
        f.write(source.read_range(origin, start, min(origin.nbytes, start + COPY_BYTES)))
