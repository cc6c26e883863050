"""What a view costs at run time: bytes read per decoded token, bytes per GPU, and the context that then fits.

Bytes per decoded token
    One token reads every weight of the decoder once, except that of E routed experts only the top k are read and
    of the embedding one row. Multi-token-prediction layers are read by speculative decoding only, and a vision
    tower once per image: both count nothing. Decoding one sequence is bound by these bytes, so the ratio between
    two views is the most by which the smaller can be faster; reading the KV cache and a batch that touches most
    experts make it less, never more.

    GLM-5.2 at group size 32, in GB per token: 41.38 in FP8, of which routed experts 22.65. As INT4 these are
    12.74 (4.5 bits a weight), together 31.47: the bound is 1.315, printed 1.31 because a bound is rounded down.
    The other 18.7 (attention 12.87, shared experts 2.83, lm_head 1.90, dense MLPs 0.68, router and indexer 0.44)
    stay FP8 or BF16 and cap the gain. With ``all-mlp`` shared experts and dense MLPs become INT4 too: 1.38; with
    ``all`` attention but for kv_b_proj as well: 1.66.

Bytes per GPU under tensor parallelism
    Divided evenly: experts, MLPs, attention with heads, embedding and lm_head, vision tower. On every GPU: norms,
    router, indexer, the low-rank projections q_a and kv_a, eh_proj. K and V projections by KV heads. That is
    how SGLang and vLLM place DeepSeek-style and GQA models; GLM-5.2-FP8 comes to 88.18 GiB on each of 8 GPUs.

Capacity
    ``(memory * fraction - weights) / KV bytes per token``. The fraction (0.9) leaves room for activations, CUDA
    graphs and the driver, which are not modelled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..errors import UsageError
from ..models.config import TextShape
from ..models.kv import KvBytes
from ..models.role import Role
from ..units import MIB, format_gib, parse_bytes

# memory.total as nvidia-smi prints it, in MiB. What CUDA hands out is some 0.5 GiB less; the fraction covers it.
GPU_MEMORY: Mapping[str, int] = {
    "a100": 81_920 * MIB,  # 80 GB
    "h100": 81_559 * MIB,  # SXM, 80 GB; modal-labs/modal-client PR 2797
    "h200": 143_771 * MIB,  # 141 GB
    "b200": 183_359 * MIB,  # 180 GB; nvidia-smi of driver 570
}  # fmt: skip
DEFAULT_GPUS = 8  # a node
DEFAULT_FRACTION = 0.9

_REPLICATED_ROLES = frozenset({Role.NORM, Role.ROUTER, Role.INDEXER})
_REPLICATED_MODULES = frozenset({"q_a_proj", "kv_a_proj_with_mqa", "eh_proj"})
_NOT_DECODED = frozenset({Role.MTP, Role.VISION})
_NOT_WEIGHTS = frozenset({"weight_shape"})  # bookkeeping: read at load, never on a GPU


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of a view, or several added up that differ in nothing named here.

    Attributes:
        shape: of one of them; only the rows of an embedding matter.
        leaf: last component of the module (``q_a_proj``).
        part: suffix of the name (``weight_scale``).
        differs: a tensor of the decode view whose content is not also in the prefill view.
    """

    role: Role
    leaf: str
    part: str
    shape: tuple[int, ...]
    nbytes: int
    is_mtp: bool = False
    differs: bool = False


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU by name and its memory in bytes."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """Context that fits on a group of GPUs.

    Attributes:
        weight_bytes, kv_bytes: weights, and KV cache per token, on each GPU.
        usable_bytes: memory of one GPU times the fraction.
        tokens: context tokens over all sequences; 0 when not even the weights fit.
        problem: ``does not fit: needs X per GPU, has Y``, or None.
    """

    weight_bytes: int
    kv_bytes: int
    usable_bytes: int
    tokens: int
    problem: str | None


def choose_gpu(name: str | None, memory: str | int | None) -> Gpu | None:
    """The GPU that ``--gpu`` or ``--gpu-memory`` means; None when neither is given.

    Raises:
        UsageError: both are given, the name is unknown, or the memory is not a size with a unit.
    """
    if name is not None and memory is not None:
        raise UsageError("--gpu and --gpu-memory exclude each other", hint="Give one of them.")
    if memory is not None:
        nbytes = parse_bytes(memory, where="--gpu-memory")
        return Gpu(format_gib(nbytes), nbytes)
    if name is None:
        return None
    key = name.lower().removeprefix("nvidia-").removeprefix("nvidia ")
    if key not in GPU_MEMORY:
        raise UsageError(
            f"unknown GPU {name!r}", where="--gpu", accepted=", ".join(GPU_MEMORY),
            hint="For another one give its memory: --gpu-memory 140GiB",
        )  # fmt: skip
    return Gpu(key, GPU_MEMORY[key])


def bytes_per_token(weights: Iterable[Weight], shape: TextShape) -> dict[Role, int]:
    """Weight bytes read for one decoded token, by role; roles that read nothing are left out."""
    read: dict[Role, int] = {}
    embedding_bytes = 0
    for weight in weights:
        if weight.is_mtp or weight.role in _NOT_DECODED or weight.part in _NOT_WEIGHTS:
            continue
        nbytes = weight.nbytes
        if weight.role is Role.EMBEDDING:
            embedding_bytes += nbytes
            nbytes //= max(weight.shape[0], 1) if weight.shape else 1
        read[weight.role] = read.get(weight.role, 0) + nbytes
    if Role.ROUTED_EXPERT in read and shape.experts:
        read[Role.ROUTED_EXPERT] = read[Role.ROUTED_EXPERT] * shape.top_k // shape.experts
    if Role.LM_HEAD not in read and embedding_bytes:
        read[Role.LM_HEAD] = embedding_bytes  # tied: the embedding is the output matrix, and all of it is read
    return {role: read[role] for role in Role if read.get(role)}


def speedup_bound(before: Mapping[Role, int], after: Mapping[Role, int]) -> float:
    """The most by which decoding one sequence gets faster: bytes read before over bytes read after."""
    return sum(before.values()) / sum(after.values())


def bytes_per_gpu(weights: Iterable[Weight], shape: TextShape, tp: int, *, include_mtp: bool = False) -> int:
    """Weight bytes on each of ``tp`` GPUs, rounded up; multi-token-prediction layers only on request."""
    whole = divided = by_kv_head = 0
    for weight in weights:
        if weight.part in _NOT_WEIGHTS or (not include_mtp and (weight.is_mtp or weight.role is Role.MTP)):
            continue
        if is_replicated(weight):
            whole += weight.nbytes
        elif shape.mla is None and weight.role is Role.ATTENTION and weight.leaf in ("k_proj", "v_proj"):
            by_kv_head += weight.nbytes
        else:
            divided += weight.nbytes
    return whole + -(-divided // tp) + -(-by_kv_head // min(tp, shape.kv_heads))


def is_replicated(weight: Weight) -> bool:
    """Whether every GPU of a tensor-parallel group holds all of it."""
    if weight.role is Role.MTP and weight.leaf.endswith("norm"):
        return True
    return weight.role in _REPLICATED_ROLES or weight.leaf in _REPLICATED_MODULES


def both_views(prefill: Iterable[Weight], decode: Iterable[Weight]) -> list[Weight]:
    """What a GPU holds that serves both phases: the prefill view, and of the decode view what differs from it.

    Everything else is the same in both and exists once.
    """
    return [*prefill, *(w for w in decode if w.differs)]


def capacity(weight_bytes: int, kv: KvBytes, kv_bytes: int, gpu: Gpu, gpus: int, fraction: float) -> Capacity:
    """Context capacity of ``gpus`` GPUs with tensor parallelism over all of them.

    Args:
        weight_bytes: on each GPU (``bytes_per_gpu``).
        kv_bytes: per token over all layers, one of the figures in ``kv``.
        fraction: part of the memory that weights and KV cache may take.

    Raises:
        UsageError: gpus < 1, or fraction not in (0, 1].
    """
    if gpus < 1:
        raise UsageError(f"{gpus} GPUs", where="--gpus", accepted="1 or more")
    if not 0 < fraction <= 1:
        raise UsageError(f"memory fraction {fraction}", accepted="more than 0, at most 1")
    usable = int(gpu.nbytes * fraction)
    per_gpu = kv.on_one_gpu(kv_bytes, gpus)
    tokens = (usable - weight_bytes) // per_gpu
    problem = None
    if tokens < 1:
        problem = f"does not fit: needs {format_gib(weight_bytes)} per GPU, has {format_gib(usable)}"
    return Capacity(weight_bytes, per_gpu, usable, max(tokens, 0), problem)
