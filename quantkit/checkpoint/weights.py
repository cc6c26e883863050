"""Which tensors together are a weight: the codes, the scale that belongs to them, how they are laid out.

A scale is looked up by its exact name, in whatever file it stands; matching by substring has paired the wrong
tensors in other tools, and casting FP8 codes without their scale gives a model that loads and talks nonsense. So
everything that does not fit is an error that names the tensor, the shape seen and the shape expected.

``weight_scale_inv`` multiplies, despite its name; so do ``weight_scale`` and DeepSeek's ``scale``.
Left out: fused three-dimensional expert weights (they are found as tensors, not as weights), zero points,
activation scales (``input_scale`` stays an ordinary tensor).

Legend: O output features (rows), I input features (columns), G groups per row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import QuantkitError, SourceError, UnsupportedError, UsageError
from .config import Declared, declared
from .tensor import Storage, StoredWeight, TensorInfo

SCALE_PARTS = ("weight_scale_inv", "weight_scale", "scale")
PLAIN_DTYPES = ("BF16", "F16", "F32")
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
_CODED = {
    "F8_E5M2": "FP8 e5m2 weights are not supported",
    "F8_E8M0": "a weight of bare exponents is not supported",
    "F4": "FP4 weights are not supported",
    "F6_E2M3": "FP6 weights are not supported",
    "F6_E3M2": "FP6 weights are not supported",
    "I8": "INT8 weights are not supported",
    "U8": "weights packed in bytes (NVFP4, MXFP4, bitsandbytes) are not supported",
}
_ACCEPTED = "BF16, F16, F32, FP8 e4m3 with scales, INT4 pack-quantized"
_ORIGINAL = "Convert from the publisher's BF16 or FP8 block checkpoint instead."
_INCOMPLETE = "The checkpoint is incomplete or its tensors were renamed: download it again."


def find_weights(tensors: Mapping[str, TensorInfo], config: dict[str, Any]) -> dict[str, StoredWeight]:
    """All two-dimensional weights by module name, in the order of ``tensors``; headers only, nothing is read.

    Raises:
        SourceError: a scale is missing, doubled, of the wrong shape, or has no weight.
        UnsupportedError: a weight is stored in a format that quantkit does not read.
    """
    says = declared(config)
    found: dict[str, StoredWeight] = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if not module:
            continue
        if part == "weight":
            weight = _weight(module, tensor, tensors, says)
            if weight is not None:
                _add(found, weight)
        elif part == "weight_packed" and len(tensor.shape) == 2:
            _add(found, _int4(module, tensor, tensors, says))
        elif part == "qweight":
            raise UnsupportedError(
                "GPTQ or AWQ weights are not supported", where=_at(tensor), accepted=_ACCEPTED, hint=_ORIGINAL
            )
        elif part in ("weight_scale_inv", "weight_scale"):
            if f"{module}.weight" not in tensors and f"{module}.weight_packed" not in tensors:
                raise SourceError(
                    f"the weight {module}.weight of this scale is missing", where=_at(tensor), hint=_INCOMPLETE
                )
        elif tensor.dtype == "F8_E4M3" and len(tensor.shape) == 2:
            raise UnsupportedError(
                "FP8 codes under a name that does not end in .weight, so that their scale cannot be told",
                where=_at(tensor),
                accepted="<module>.weight",
            )
    return found


def no_such_weight(name: str, tensors: Mapping[str, TensorInfo]) -> QuantkitError:
    """The error for a module (or tensor name) that is not among the weights."""
    for candidate in (f"{name}.weight", f"{name}.weight_packed", name):
        tensor = tensors.get(candidate)
        if tensor is None:
            continue
        if len(tensor.shape) == 3:
            return UnsupportedError(
                f"{tensor.shape[0]} experts fused into one tensor of shape {list(tensor.shape)}: not supported",
                where=_at(tensor),
                accepted="one two-dimensional weight per expert",
                hint="Split the experts first (transformers' save_pretrained writes them so).",
            )
        return UsageError(
            f"{tensor.dtype} tensor of shape {list(tensor.shape)} is not a two-dimensional weight",
            where=_at(tensor),
        )
    return UsageError(f"there is no weight {name!r}", hint="`quantkit inspect` lists the tensors.")


def _add(found: dict[str, StoredWeight], weight: StoredWeight) -> None:
    other = found.setdefault(weight.module, weight)
    if other is not weight:
        raise SourceError(
            f"the weight is stored twice: {other.weight.name} and {weight.weight.name}",
            where=_at(weight.weight),
            hint="Remove the one that is not meant.",
        )


def _weight(
    module: str, tensor: TensorInfo, tensors: Mapping[str, TensorInfo], says: Declared
) -> StoredWeight | None:
    if tensor.dtype == "F8_E4M3":
        return _fp8(module, tensor, tensors, says)
    if len(tensor.shape) != 2:
        return None
    if tensor.dtype in _CODED:
        raise UnsupportedError(_CODED[tensor.dtype], where=_at(tensor), accepted=_ACCEPTED, hint=_ORIGINAL)
    if tensor.dtype not in PLAIN_DTYPES:
        return None
    for part in ("weight_scale_inv", "weight_scale"):
        if f"{module}.{part}" in tensors:
            raise SourceError(
                f"{tensor.dtype} weight with a scale ({module}.{part}): is it applied already or not?",
                where=_at(tensor),
                hint="Remove the scale if the weight was dequantized, or restore the FP8 weight.",
            )
    return StoredWeight(module, Storage.PLAIN, _two(tensor), tensor, None, (0, 0))


def _fp8(
    module: str, tensor: TensorInfo, tensors: Mapping[str, TensorInfo], says: Declared
) -> StoredWeight | None:
    if len(tensor.shape) == 3:
        return None  # fused experts; refused by name when they are asked for
    if len(tensor.shape) != 2:
        raise UnsupportedError(f"FP8 codes of shape {list(tensor.shape)}", where=_at(tensor), accepted="[O, I]")
    scale = _scale_of(module, tensor, tensors)
    rows, columns = shape = _two(tensor)
    grid = (-(-rows // says.block[0]), -(-columns // says.block[1]))
    layouts = {
        "block": (Storage.FP8_BLOCK, (grid,), says.block),
        "channel": (Storage.FP8_CHANNEL, ((rows, 1),), (1, columns)),
        "tensor": (Storage.FP8_TENSOR, ((), (1,), (1, 1)), (rows, columns)),
    }
    expected = []
    for strategy, (storage, shapes, block) in layouts.items():
        if says.strategies and strategy not in says.strategies:
            continue
        if scale.shape in shapes:
            return StoredWeight(module, storage, shape, tensor, scale, block)
        detail = f" (blocks of {block[0]} x {block[1]})" if strategy == "block" else ""
        expected.append(f"{list(shapes[0])} per {strategy}{detail}")
    raise SourceError(
        f"scale of shape {list(scale.shape)} does not fit the weight of shape {list(shape)} in {tensor.file}",
        where=_at(scale),
        accepted=" or ".join(expected),
        hint="The block size is quantization_config.weight_block_size of config.json, 128 x 128 if not given.",
    )


def _scale_of(module: str, tensor: TensorInfo, tensors: Mapping[str, TensorInfo]) -> TensorInfo:
    """The one scale of an FP8 weight, by exact name, in any file."""
    names = [f"{module}.{part}" for part in SCALE_PARTS]
    scales = [tensors[name] for name in names if name in tensors]
    if not scales:
        raise SourceError(
            f"FP8 weight without a scale in any file (looked for {', '.join(names)})",
            where=_at(tensor),
            hint=f"{_INCOMPLETE} FP8 codes mean nothing without their scale and are never cast as they are.",
        )
    if len(scales) > 1:
        raise SourceError(
            f"FP8 weight with several scales: {', '.join(s.name for s in scales)}",
            where=_at(tensor),
            hint="Remove the one that does not belong to it.",
        )
    return _scale_dtype(scales[0], SCALE_DTYPES)


def _scale_dtype(scale: TensorInfo, accepted: tuple[str, ...]) -> TensorInfo:
    if scale.dtype not in accepted:
        raise UnsupportedError(f"scale of dtype {scale.dtype}", where=_at(scale), accepted=", ".join(accepted))
    return scale


def _int4(module: str, packed: TensorInfo, tensors: Mapping[str, TensorInfo], says: Declared) -> StoredWeight:
    """INT4 as compressed-tensors packs it: eight columns in an int32, one scale per group of columns."""
    for part in ("weight_zero_point", "weight_g_idx"):
        if f"{module}.{part}" in tensors:
            raise UnsupportedError(
                f"INT4 with {part} is not supported", where=_at(packed), accepted="symmetric, in natural order"
            )
    if packed.dtype != "I32":
        raise UnsupportedError(f"packed weight of dtype {packed.dtype}", where=_at(packed), accepted="I32")
    if says.packed_bits - {4}:
        raise UnsupportedError(
            f"packed integers of {sorted(says.packed_bits)} bits are declared",
            where=_at(packed),
            accepted="4 bits",
        )
    parts = {part: tensors.get(f"{module}.{part}") for part in ("weight_scale", "weight_shape")}
    for part, tensor in parts.items():
        if tensor is None:
            raise SourceError(f"INT4 weight without {module}.{part}", where=_at(packed), hint=_INCOMPLETE)
    scale, shape = parts["weight_scale"], parts["weight_shape"]
    assert scale is not None and shape is not None  # both were looked for just above
    _scale_dtype(scale, PLAIN_DTYPES)
    if shape.dtype not in ("I32", "I64") or shape.shape != (2,):
        raise SourceError(
            f"weight_shape is {shape.dtype} {list(shape.shape)}",
            where=_at(shape),
            accepted="I32 or I64 of shape [2]",
        )
    rows, columns = packed.shape[0], packed.shape[1] * 8
    group = _group_size(packed, scale, says)
    return StoredWeight(module, Storage.INT4_GROUP, (rows, columns), packed, scale, (1, group), (shape,))


def _group_size(packed: TensorInfo, scale: TensorInfo, says: Declared) -> int:
    """Columns per scale: a declared size that fits, or the even division when nothing is declared.

    A group of 8 n columns needs I to be a multiple of it, so that the packed words have no padding.
    """
    rows, columns = packed.shape[0], packed.shape[1] * 8
    if len(scale.shape) == 2 and scale.shape[0] == rows and (groups := scale.shape[1]) > 0:
        sizes = {size or columns for size in says.group_sizes} or {columns // groups}
        for size in sorted(sizes):
            if size * groups == columns:
                return size
    known = sorted(size or columns for size in says.group_sizes) or [32, 64, 128]
    raise SourceError(
        f"scale of shape {list(scale.shape)} does not fit the INT4 weight of {[rows, columns]} in {packed.file}",
        where=_at(scale),
        accepted=" or ".join(f"{[rows, -(-columns // size)]} for groups of {size}" for size in known if size),
        hint="The group size is config_groups.*.weights.group_size of config.json.",
    )


def _two(tensor: TensorInfo) -> tuple[int, int]:
    return tensor.shape[0], tensor.shape[1]


def _at(tensor: TensorInfo) -> str:
    return f"{tensor.file}, tensor {tensor.name!r}"
