"""Tensors of a checkpoint, mapped from its files: nothing is read before it is used, nothing is copied.

A mapping is private and never written to. Where a tensor is not aligned to its type (a publisher's file may do
that), and where the kernels want a scale in float32 that is stored otherwise, it is copied.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from quantkit.checkpoint import Checkpoint
from quantkit.checkpoint.tensor import Storage, StoredWeight, TensorInfo
from quantkit.errors import SourceError, UnsupportedError
from quantkit_kernels.forward.weights import Fp8Weight, Int4Weight

from .weights import PlainWeight, Stored

_DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
_WHOLE_ROW = 1 << 20  # columns that share a scale where it is one per row: more than any weight has, so that
# gate, up and down of an expert have one format


class MappedTensors:
    """One weight set.

    Attributes:
        checkpoint: where it comes from.
        used: names of tensors that were asked for.
    """

    def __init__(self, checkpoint: Checkpoint, digests: Mapping[str, str] | None = None) -> None:
        """
        Args:
            digests: sha256 of the bytes of every tensor by name; None where there is but one weight set, whose
                names then stand for its bytes.
        """
        self.checkpoint = checkpoint
        self.used: set[str] = set()
        self._digests = digests
        self._files: dict[str, Tensor] = {}

    def has(self, name: str) -> bool:
        return name in self.checkpoint.tensors

    def identity(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """What tells the bytes of these tensors from others'."""
        return names if self._digests is None else tuple(self._digests.get(name, name) for name in names)

    def info(self, name: str) -> TensorInfo:
        """Raises SourceError if the tensor is missing."""
        found = self.checkpoint.tensors.get(name)
        if found is None:
            raise _missing(name, self.checkpoint)
        return found

    def tensor(self, name: str) -> Tensor:
        """A plain tensor.

        Raises:
            SourceError: it is missing.
            UnsupportedError: its type.
        """
        self.used.add(name)
        return self._mapped(self.info(name))

    def weight(self, module: str) -> StoredWeight:
        """How a linear is stored.

        Raises:
            SourceError: it is missing.
        """
        found = self.checkpoint.weights().get(module)
        if found is None:
            raise _missing(f"{module}.weight", self.checkpoint)
        self.used.update(part.name for part in found.parts)
        return found

    def load(self, weight: StoredWeight) -> Stored:
        """The tensors of a linear as the operations take them.

        Raises:
            SourceError: scales that can't be right.
            UnsupportedError: a format that the kernels don't compute with.
        """
        values = self._mapped(weight.weight)
        if weight.scale is None:
            return PlainWeight(values)
        try:
            if weight.storage is Storage.INT4_GROUP:
                return Int4Weight(values, self._mapped(weight.scale))
            rows, columns = weight.block
            scale = torch.from_numpy(self.checkpoint.scales_float32(weight))
            block = (rows, columns) if weight.storage is Storage.FP8_BLOCK else (rows, _WHOLE_ROW)
            return Fp8Weight(values, scale, block)
        except (TypeError, ValueError) as problem:
            raise UnsupportedError(str(problem), where=weight.weight.place) from problem

    def _mapped(self, info: TensorInfo) -> Tensor:
        dtype = _DTYPES.get(info.dtype)
        if dtype is None:
            raise UnsupportedError(f"a tensor of {info.dtype}", where=info.place, accepted=", ".join(_DTYPES))
        raw = self._file(info.file)[info.offset : info.offset + info.nbytes]
        if info.offset % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(info.shape)

    def _file(self, file: str) -> Tensor:
        if file not in self._files:
            path = self.checkpoint.fetch(file)
            self._files[file] = torch.from_numpy(np.memmap(path, np.uint8, mode="c"))
        return self._files[file]


def _missing(name: str, checkpoint: Checkpoint) -> SourceError:
    return SourceError(
        "the model needs a tensor that is not there", where=f"{checkpoint.label}, tensor {name!r}",
        hint="config.json and the weights must belong together; run quantkit verify on an artifact.",
    )  # fmt: skip
