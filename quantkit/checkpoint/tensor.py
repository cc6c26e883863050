"""What a header says of one tensor, and how a logical weight is stored in several of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint; nothing of its data is loaded.

    Attributes:
        name: opaque key, never used as a path.
        dtype: safetensors spelling, for example ``F8_E4M3``.
        shape: dimensions.
        file: name of the file that holds it, relative to the checkpoint.
        offset: absolute byte offset of the data in that file.
        nbytes: length of the data in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int

    @property
    def place(self) -> str:
        """File and name, as messages state them; the name quoted, because it may hold any character."""
        return f"{self.file}, tensor {self.name!r}"


class Storage(str, Enum):
    """How the numbers of a logical weight are stored."""

    FP8_BLOCK = "fp8-block"  # e4m3 + one scale per block; partial blocks at the edges
    FP8_CHANNEL = "fp8-channel"  # e4m3 + one scale per output row (compressed-tensors float-quantized)
    FP8_TENSOR = "fp8-tensor"  # e4m3 + one scale in all
    INT4_GROUP = "int4-group"  # compressed-tensors pack-quantized
    PLAIN = "plain"  # BF16, F16 or F32


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A logical two-dimensional weight ``[O, I]`` and the tensors that hold it.

    Attributes:
        module: name without the parameter suffix, for example ``model.layers.3.mlp.experts.0.up_proj``.
        storage: how it is stored.
        shape: ``(O, I)``.
        weight: the tensor with the codes (or the plain weight, or ``weight_packed``).
        scale: the scale tensor, None for PLAIN.
        block: rows and columns that share a scale: (128, 128) for blocks, (1, I) per channel, (O, I) per tensor,
            (1, group_size) for INT4; (0, 0) for PLAIN.
        extra: further tensors that belong to it (``weight_shape``).
    """

    module: str
    storage: Storage
    shape: tuple[int, int]
    weight: TensorInfo
    scale: TensorInfo | None
    block: tuple[int, int]
    extra: tuple[TensorInfo, ...] = ()

    @property
    def parts(self) -> tuple[TensorInfo, ...]:
        """All tensors of this weight, the codes first."""
        return (self.weight, *((self.scale,) if self.scale else ()), *self.extra)
