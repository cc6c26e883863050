"""What happens to every source tensor, and the jobs and shards that make it happen.

``Fate`` is the accounting (one line per source tensor), ``Job`` is the work (one per output module or copied
tensor), ``Shard`` is the file that a run of jobs writes. All three are plain frozen data: planning fills
them in, conversion executes them, verification checks against them, and nobody decides twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from ..models.role import Role
from ..safetensors_header import file_order, render_header
from ..scheme import OutputTensor

# ``Fate.reason`` of what an amendment left unquantized.
KEPT_BY_BUDGET: Literal["quality budget"] = "quality budget"


class Action(str, Enum):
    """What becomes of a source tensor in one view."""

    KEEP = "keep"  # same bytes under the same name
    RENAME = "rename"  # same bytes under another name (weight_scale_inv -> weight_scale)
    QUANTIZE = "quantize"  # consumed by quantization (a weight, or the scale that belongs to it)
    TRANSFORM = "transform"  # re-derived in another precision (FP8 -> BF16 rest, BF16 or INT4 -> FP8)
    EXCLUDE = "exclude"  # left out because the user asked for it, with a reason


class Op(str, Enum):
    """The operation of a job."""

    COPY = "copy"  # bytes as they are
    TO_INT4 = "to-int4"  # any stored weight -> group INT4
    TO_FP8 = "to-fp8"  # plain or INT4 weight -> FP8 block
    TO_BF16 = "to-bf16"  # FP8 or INT4 weight -> BF16
    FOLD = "fold"  # the scale that a calibrated method moves from up to down; a by-product of quantizing them


@dataclass(frozen=True, slots=True)
class Fate:
    """The fate of one source tensor in both views.

    ``decode`` and ``prefill`` say what happens, ``decode_names`` and ``prefill_names`` what the tensor's content
    is called there (empty when excluded; the outputs of a quantized module stand at its weight and its scale).
    """

    name: str
    role: Role
    layer: int | None
    expert: int | None
    is_mtp: bool
    decode: Action
    prefill: Action
    decode_names: tuple[str, ...]
    prefill_names: tuple[str, ...]
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One piece of work: read some source tensors, write some output tensors.

    Attributes:
        op: operation.
        sources: names of the source tensors in the order of ``StoredWeight.parts`` (one name for COPY; for FOLD
            the weights of up and of down).
        outputs: tensors written; where their bytes stand in the shard is the shard's matter (``Shard.tensors``).
        method: of the recipe for TO_INT4, and for FOLD that of its weights; else None.
        group_size: for TO_INT4, else None.
    """

    op: Op
    sources: tuple[str, ...]
    outputs: tuple[OutputTensor, ...]
    method: str | None = None
    group_size: int | None = None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.outputs)


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a view, or of the folds: the jobs that fill it, in the order of work.

    ``layer`` is the decoder layer it belongs to, None for tensors outside the layers. A unit of work (and of a
    plan amendment) is all shards of one layer.
    """

    view: str  # "decode", "prefill" or "folds": its folder
    file: str
    layer: int | None
    jobs: tuple[Job, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data."""
        return sum(j.nbytes for j in self.jobs)

    @property
    def tensors(self) -> tuple[OutputTensor, ...]:
        """All tensors in the order of their bytes in the file (wide dtypes first, so that each is aligned)."""
        return file_order(t for j in self.jobs for t in j.outputs)

    @property
    def file_nbytes(self) -> int:
        """Size of the finished file, header included."""
        return len(render_header(self.tensors)) + self.nbytes
