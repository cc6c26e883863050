"""What becomes of one weight in each view: the operation, its outputs and the names the content goes by.

One function per view. They know formats, not policies: which modules are quantized was decided in ``selection``,
what kind of source this is in ``build``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ..checkpoint.tensor import Storage, StoredWeight
from ..errors import UnsupportedError
from ..models.role import Role, TensorRole
from ..recipe.sections import DecodeSection
from ..recipe.treatment import Treatment
from ..scheme import Fp8Block, OutputTensor, Scheme
from .fate import Action, Job, Op

FP8 = frozenset({Storage.FP8_BLOCK, Storage.FP8_CHANNEL, Storage.FP8_TENSOR})
_FP8_ROLES = frozenset({Role.ROUTED_EXPERT, Role.SHARED_EXPERT, Role.DENSE_MLP, Role.ATTENTION, Role.INDEXER})


@dataclass(frozen=True, slots=True)
class Outcome:
    """A weight in one view.

    Attributes:
        stored: how it is stored there.
        jobs: what makes it (empty where the view is the source itself).
        parts: action and names for each of ``StoredWeight.parts``.
        block: rows and columns per scale there.
    """

    stored: Storage
    jobs: tuple[Job, ...]
    parts: tuple[tuple[Action, tuple[str, ...]], ...]
    block: tuple[int, int]


def is_fp8_selected(role: TensorRole, keep_plain: Collection[str]) -> bool:
    """Whether the family's published FP8 checkpoints store this module in FP8."""
    return role.role in _FP8_ROLES and role.projection not in keep_plain


def untouched(weight: StoredWeight) -> Outcome:
    """A weight of a view that is the source itself: nothing is written."""
    return Outcome(weight.storage, (), tuple([(Action.KEEP, (p.name,)) for p in weight.parts]), weight.block)


def copied(weight: StoredWeight) -> Outcome:
    """The same bytes under the same names, in files that are written."""
    jobs = tuple([copy(part.name, part.name, part.dtype, part.shape) for part in weight.parts])
    return Outcome(weight.storage, jobs, untouched(weight).parts, weight.block)


def copy(source: str, name: str, dtype: str, shape: tuple[int, ...]) -> Job:
    """The job that copies one tensor."""
    return Job(Op.COPY, (source,), (OutputTensor(name, dtype, shape),))


def quantized(weight: StoredWeight, scheme: Scheme, way: Treatment) -> Outcome:
    """Group INT4 in the decode view; ``scheme`` is that of the group size."""
    outputs = scheme.outputs(weight.module, weight.shape)
    return _made(
        weight, Job(Op.TO_INT4, _names(weight), outputs, way.method, way.group_size),
        Storage.INT4_GROUP, (1, way.group_size), Action.QUANTIZE,
    )  # fmt: skip


def decode_rest(weight: StoredWeight, decode: DecodeSection, make_fp8: bool) -> Outcome:
    """A weight of the decode view that is not quantized.

    Args:
        make_fp8: this plain weight becomes FP8 (derived prefill view, same module selection).

    Raises:
        UnsupportedError: INT4 among the weights of a source that is otherwise not INT4.
    """
    if weight.storage is Storage.INT4_GROUP:
        raise UnsupportedError("one INT4 weight in a checkpoint of another format", where=weight.weight.name)
    if weight.storage in FP8:
        return _to_bf16(weight) if decode.rest == "bf16" else _fp8_kept(weight)
    if make_fp8 and decode.rest == "fp8":
        return to_fp8(weight, scale_part="weight_scale")
    return copied(weight)


def to_fp8(weight: StoredWeight, scale_part: str = "weight_scale_inv") -> Outcome:
    """FP8 block derived from a plain or INT4 weight; the scale's name is the view's convention."""
    scheme = Fp8Block()
    codes, scale = scheme.outputs(weight.module, weight.shape)
    scale = OutputTensor(f"{weight.module}.{scale_part}", scale.dtype, scale.shape)
    job = Job(Op.TO_FP8, _names(weight), (codes, scale))
    return _made(weight, job, Storage.FP8_BLOCK, scheme.block, Action.TRANSFORM)


def _fp8_kept(weight: StoredWeight) -> Outcome:
    """FP8 byte for byte; the scale takes the name that compressed-tensors reads."""
    jobs, parts = [], []
    for part in weight.parts:
        name = f"{weight.module}.weight_scale" if part is weight.scale else part.name
        jobs.append(copy(part.name, name, part.dtype, part.shape))
        parts.append((Action.KEEP if name == part.name else Action.RENAME, (name,)))
    return Outcome(weight.storage, tuple(jobs), tuple(parts), weight.block)


def _to_bf16(weight: StoredWeight) -> Outcome:
    output = OutputTensor(f"{weight.module}.weight", "BF16", weight.shape)
    job = Job(Op.TO_BF16, _names(weight), (output,))
    return _made(weight, job, Storage.PLAIN, (0, 0), Action.TRANSFORM)


def _made(weight: StoredWeight, job: Job, stored: Storage, block: tuple[int, int], action: Action) -> Outcome:
    names = tuple(output.name for output in job.outputs)
    return Outcome(stored, (job,), ((action, names),) * len(weight.parts), block)


def _names(weight: StoredWeight) -> tuple[str, ...]:
    return tuple(part.name for part in weight.parts)
