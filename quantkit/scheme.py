"""Weight formats that quantkit can write: which tensors a module becomes, of which dtype and shape.

A scheme knows names, shapes and the compressed-tensors description of itself. It holds no numerics (those
are operations of ``quantkit_kernels``) and no policy (that is the recipe's). New decode formats register
here and need no change elsewhere in planning or writing.

Legend: O output features (rows), I input features (columns).
Source: compressed-tensors 0.19 ``pack-quantized`` and ``float-quantized``; docs/format.md section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from .dtypes import tensor_bytes

GROUP_SIZES = (32, 64, 128)
FP8_BLOCK = (128, 128)
FOLD_PART, FOLD_DTYPE = "awq_scale", "F32"


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One tensor to be written: its name in the view, safetensors dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.dtype, self.shape)


def fold_tensor(up: str, rows: int) -> OutputTensor:
    """The scale that was moved out of ``rows`` rows of the module ``up``; no part of any view."""
    return OutputTensor(f"{up}.{FOLD_PART}", FOLD_DTYPE, (rows,))


class Scheme(Protocol):
    """What planning and writing need to know of a weight format."""

    @property
    def name(self) -> str: ...

    def outputs(self, module: str, shape: tuple[int, int]) -> tuple[OutputTensor, ...]: ...

    def problem(self, shape: tuple[int, int]) -> str | None: ...

    def quantization_args(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Int4Group:
    """Symmetric INT4, one BF16 scale per group of ``group_size`` columns (compressed-tensors pack-quantized)."""

    group_size: int

    @property
    def name(self) -> str:
        return f"int4-g{self.group_size}"

    def outputs(self, module: str, shape: tuple[int, int]) -> tuple[OutputTensor, ...]:
        o, i = shape
        return (
            OutputTensor(f"{module}.weight_packed", "I32", (o, -(-i // 8))),
            OutputTensor(f"{module}.weight_scale", "BF16", (o, i // self.group_size)),
            OutputTensor(f"{module}.weight_shape", "I64", (2,)),
        )

    def problem(self, shape: tuple[int, int]) -> str | None:
        """Why a weight of this shape cannot be stored so, or None."""
        if shape[1] % self.group_size == 0:
            return None
        fits = [g for g in GROUP_SIZES if shape[1] % g == 0]
        say = f"group sizes that fit: {', '.join(map(str, fits))}" if fits else "no supported group size fits"
        return f"{shape[1]} input features are not divisible by group_size {self.group_size} ({say})"

    def quantization_args(self) -> dict[str, Any]:
        return {
            "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
            "group_size": self.group_size, "dynamic": False, "actorder": None,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fp8Block:
    """FP8 e4m3 with one float32 scale per 128 x 128 block, as the publishers store it (``weight_scale_inv``)."""

    block: tuple[int, int] = FP8_BLOCK

    @property
    def name(self) -> str:
        return "fp8-block"

    def outputs(self, module: str, shape: tuple[int, int]) -> tuple[OutputTensor, ...]:
        grid = (-(-shape[0] // self.block[0]), -(-shape[1] // self.block[1]))
        return (
            OutputTensor(f"{module}.weight", "F8_E4M3", shape),
            OutputTensor(f"{module}.weight_scale_inv", "F32", grid),
        )

    def problem(self, shape: tuple[int, int]) -> str | None:
        return None

    def quantization_args(self) -> dict[str, Any]:
        return {
            "num_bits": 8, "type": "float", "symmetric": True, "strategy": "block",
            "block_structure": list(self.block), "dynamic": False,
        }  # fmt: skip


def decode_scheme(name: str, group_size: int) -> Scheme:
    """The decode format of a recipe (``int4``); raises KeyError with the known names if unknown."""
    try:
        return DECODE_SCHEMES[name](group_size)
    except KeyError:
        raise KeyError(f"unknown decode scheme {name!r}; known: {', '.join(sorted(DECODE_SCHEMES))}") from None


DECODE_SCHEMES: dict[str, type[Int4Group]] = {"int4": Int4Group}
