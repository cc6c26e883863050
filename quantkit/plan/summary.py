"""Everything ``quantkit plan`` shows, as one JSON-able dictionary.

It gathers: the plan's own summary (fates, sizes), what the conversion costs (memory, disk, time) and what comes of
it (bytes per decoded token, KV cache, context capacity, engines). Where a config lacks the numbers for a section,
the section is None and ``unknown`` says why: a plan does not fail for what it can only not tell.

Keys besides those of ``Plan.summary``: ``output``, ``memory``, ``disk``, ``time``, ``decode_reads``, ``kv_cache``,
``capacity`` (None unless a GPU was named), ``engines``, ``unknown``; with a calibrated method ``calibration``.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import SourceError
from ..models.config import TextShape, quantization_of, text_shape
from ..models.engine_rules import Level
from ..models.engines import TENSOR_PARALLEL, check_all, verdict
from ..models.kv import KvBytes, kv_bytes_per_token
from ..models.role import Role
from .capacity import (
    DEFAULT_FRACTION,
    DEFAULT_GPUS,
    Gpu,
    Weight,
    both_views,
    bytes_per_gpu,
    bytes_per_token,
    capacity,
    choose_gpu,
    speedup_bound,
)
from .estimate import estimate_disk, estimate_time
from .fate import Action, Fate, Op
from .memory import choose_budget, widest_row_block
from .probe import Rates, measure

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..recipe.sections import CalibrationSection
    from .plan import Plan

VIEWS = ("prefill", "decode")


def summarise(
    plan: Plan,
    checkpoint: Checkpoint,
    *,
    gpu: str | None = None,
    gpus: int | None = None,
    gpu_memory: str | int | None = None,
    memory_fraction: float = DEFAULT_FRACTION,
    out_dir: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    max_memory: int | None = None,
    rates: Rates | None = None,
) -> dict[str, Any]:
    """See the module docstring; takes about half a second for measuring rates.

    Args:
        plan: made from ``checkpoint``.
        gpu, gpu_memory: name, or memory per GPU; neither: no capacity.
        gpus: how many, all in one tensor-parallel group; None: 8.
        memory_fraction: of a GPU's memory that weights and KV cache may take.
        out_dir: where the artifact would go; None: the current directory.
        jobs, max_memory: as for ``convert``.
        rates: measured before; None measures now.

    Raises:
        UsageError: an option that cannot work.
        EnvironmentProblem: ``max_memory`` is not enough for one worker.
    """
    chosen = choose_gpu(gpu, gpu_memory)
    rates = rates if rates is not None else measure(plan, checkpoint)
    weights = {weight.weight.name: weight for weight in checkpoint.weights().values()}
    widest = widest_row_block((job for shard in plan.shards for job in shard.jobs), weights)
    budget = choose_budget(jobs, max_memory, widest, rates.backend)
    result: dict[str, Any] = {
        **plan.summary(),
        "output": _output(plan, checkpoint),
        "memory": {
            "peak_bytes": budget.peak_bytes, "workers": budget.workers, "tile_bytes": budget.tile_bytes,
            "backend": rates.backend,
        },
        "disk": estimate_disk(plan, checkpoint, out_dir).to_json(),
        "time": estimate_time(plan, checkpoint, rates, budget.workers).to_json(),
    }  # fmt: skip
    unknown: dict[str, str] = {}
    try:
        shape = text_shape(checkpoint.config)
    except SourceError as problem:
        sections = ("decode_reads", "kv_cache", "capacity", "engines")
        calibrated = () if plan.recipe.calibration is None else ("calibration",)
        unknown = dict.fromkeys((*sections, *calibrated), str(problem))
        return {**result, **dict.fromkeys(unknown), "unknown": unknown}
    tensors = {view: view_weights(plan, checkpoint, view) for view in VIEWS}
    kv = kv_bytes_per_token(shape)
    if chosen is not None:
        on_gpus = _capacity(
            tensors, shape, kv, chosen, gpus if gpus is not None else DEFAULT_GPUS, memory_fraction
        )
    if plan.recipe.calibration is not None:
        result["calibration"] = _calibration(plan.recipe.calibration, shape)
    return {
        **result,
        "decode_reads": _decode_reads(tensors, shape),
        "kv_cache": _kv_cache(kv),
        "capacity": on_gpus if chosen is not None else None,
        "engines": _engines(plan, checkpoint),
        "unknown": unknown,
    }


def unloadable(plan: Plan, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Warnings about views that no engine can load at any tensor-parallel size, each with its reasons; a view that
    cannot be judged has none."""
    try:
        text_shape(checkpoint.config)
    except SourceError:
        return ()
    warnings = []
    for view, engines in _engines(plan, checkpoint).items():
        found = [judged for by_tp in engines.values() for judged in by_tp.values()]
        if all(judged["level"] == Level.NO.value for judged in found):
            at_one = [reason for by_tp in engines.values() for reason in by_tp["1"]["reasons"]]
            reasons = {reason["message"]: None for reason in at_one if reason["level"] == Level.NO.value}
            warnings.append(f"no engine will load the {view} view: {'; '.join(reasons)}")
    return tuple(warnings)


def view_weights(plan: Plan, checkpoint: Checkpoint, view: str) -> list[Weight]:
    """All tensors of a view (``prefill`` or ``decode``), those that capacity counts alike added up."""
    totals: dict[tuple[Any, ...], int] = defaultdict(int)
    for name, shape, nbytes, fate, differs in _view_tensors(plan, checkpoint, view):
        module, _, part = name.rpartition(".")
        rows = shape[:1] if fate.role is Role.EMBEDDING else ()
        totals[fate.role, module[module.rfind(".") + 1 :], part, rows, fate.is_mtp, differs] += nbytes
    return [
        Weight(role, leaf, part, rows, nbytes, is_mtp, differs)
        for (role, leaf, part, rows, is_mtp, differs), nbytes in totals.items()
    ]


def _view_tensors(
    plan: Plan, checkpoint: Checkpoint, view: str
) -> Iterator[tuple[str, tuple[int, ...], int, Fate, bool]]:
    """Name, shape, bytes, fate, and whether the content is in the decode view only."""
    shards = plan.decode if view == "decode" else plan.prefill
    if not shards:  # the publisher's files as they are
        for name, info in checkpoint.tensors.items():
            fate = plan.fates[name]
            yield name, info.shape, info.nbytes, fate, view == "decode" and fate.decode is not fate.prefill
        return
    for shard in shards:
        for job in shard.jobs:
            fate = plan.fates[job.sources[0]]
            # FP8 derived for the rest is the same in both views; INT4 and BF16 exist in the decode view only.
            differs = view == "decode" and job.op in (Op.TO_INT4, Op.TO_BF16)
            for output in job.outputs:
                yield output.name, output.shape, output.nbytes, fate, differs


def _output(plan: Plan, checkpoint: Checkpoint) -> dict[str, Any]:
    """Exact bytes of the weight files of both views, and of the other files that each view gets a copy of."""
    side = sum(file.nbytes for file in checkpoint.side_files)
    views = {
        "prefill": (plan.sizes.prefill, plan.prefill_origin),
        "decode": (plan.sizes.decode, plan.decode_origin),
    }
    return {
        view: {
            "origin": origin, "tensor_bytes": size.tensor_bytes, "weight_file_bytes": size.file_bytes,
            "weight_files": size.num_files, "side_file_bytes": side,
        }
        for view, (size, origin) in views.items()
    }  # fmt: skip


def _calibration(section: CalibrationSection, shape: TextShape) -> dict[str, Any]:
    """The recipe's section and what it takes; the text is not read here.

    ``hidden_state_bytes`` is the float32 input of one layer for all samples; ``tokens_per_expert`` is the mean,
    were the router even (None for a model without experts).
    """
    tokens = section.samples * section.length
    return {
        **section.model_dump(mode="json"), "route_all": bool(section.route_all),
        "tokens": tokens, "tokens_per_expert": tokens * shape.top_k / shape.experts if shape.experts else None,
        "hidden_state_bytes": 4 * tokens * shape.hidden,
    }  # fmt: skip


def _decode_reads(tensors: Mapping[str, list[Weight]], shape: TextShape) -> dict[str, Any]:
    """Weight bytes read per decoded token by role; the bound is rounded down, as a bound must be."""
    read = {view: bytes_per_token(tensors[view], shape) for view in VIEWS}
    bound = speedup_bound(read["prefill"], read["decode"])
    by_role = {view: {role.value: n for role, n in roles.items()} for view, roles in read.items()}
    return {
        "fp8": by_role["prefill"], "int4": by_role["decode"],
        "fp8_bytes": sum(read["prefill"].values()), "int4_bytes": sum(read["decode"].values()),
        "experts": shape.experts, "experts_per_token": shape.top_k,
        "speedup_bound": bound, "speedup_bound_shown": f"{int(bound * 100 + 1e-9) / 100:.2f}",
        "not_read": sorted(r.value for r in (Role.MTP, Role.VISION) if _has(tensors, r)),
    }  # fmt: skip


def _has(tensors: Mapping[str, list[Weight]], role: Role) -> bool:
    return any(weight.role is role for weight in tensors["prefill"])


def _kv_cache(kv: KvBytes) -> dict[str, Any]:
    """Bytes per token over all layers on one GPU: ours, and as others quote it."""
    return {
        "kind": kv.kind, "bf16_bytes": kv.bf16, "fp8_bytes": kv.fp8,
        "plain_bf16_bytes": kv.plain_bf16, "plain_fp8_bytes": kv.plain_fp8,
        "engine_bf16_bytes": kv.engine_bf16, "engine_fp8_bytes": kv.engine_fp8,
        "divided_by_tensor_parallelism": kv.heads > 1,
    }  # fmt: skip


def _capacity(
    tensors: Mapping[str, list[Weight]], shape: TextShape, kv: KvBytes, gpu: Gpu, gpus: int, fraction: float
) -> dict[str, Any]:
    """Tokens of context that fit beside the weights of each view, and of both on the same GPUs."""
    sets = {**tensors, "both": both_views(tensors["prefill"], tensors["decode"])}
    rows = []
    for held, weights in sets.items():
        per_gpu = bytes_per_gpu(weights, shape, max(gpus, 1))
        found = {
            name: capacity(per_gpu, kv, n, gpu, gpus, fraction) for name, n in (("bf16", kv.bf16), ("fp8", kv.fp8))
        }
        rows.append({
            "weights": held, "weight_bytes_per_gpu": per_gpu, "problem": found["fp8"].problem,
            "tokens": {name: c.tokens for name, c in found.items()},
            "kv_bytes_per_token_and_gpu": {name: c.kv_bytes for name, c in found.items()},
        })  # fmt: skip
    return {
        "gpu": gpu.name, "gpu_bytes": gpu.nbytes, "gpus": gpus, "memory_fraction": fraction,
        "usable_bytes_per_gpu": int(gpu.nbytes * fraction), "rows": rows,
    }  # fmt: skip


def _representatives(plan: Plan) -> list[str]:
    """All linears but routed experts, and of those one expert of every layer and way of storing it."""
    sizes = {job.sources[0]: job.group_size for job in plan.jobs("decode") if job.op is Op.TO_INT4}
    found: list[str] = []
    experts: dict[tuple[int | None, str], list[tuple[str, Action, int | None]]] = defaultdict(list)
    for fate in plan.fates.values():
        if fate.name.endswith((".weight", ".weight_packed")):
            parent, _, leaf = fate.name.rpartition(".")[0].rpartition(".")
            if fate.role is Role.ROUTED_EXPERT:
                experts[fate.layer, parent].append((leaf, fate.decode, sizes.get(fate.name)))
            else:
                found.append(f"{parent}.{leaf}")
    first = {(layer, frozenset(stored)): (parent, stored) for (layer, parent), stored in experts.items()}
    return sorted([*found, *(f"{parent}.{leaf}" for parent, stored in first.values() for leaf, _, _ in stored)])


def _engines(plan: Plan, checkpoint: Checkpoint) -> dict[str, Any]:
    """view -> engine -> tensor-parallel size -> level and the reasons that are not ``ok``."""
    modules = _representatives(plan)
    configs = {"prefill": plan.prefill_config or checkpoint.config, "decode": plan.decode_config}
    return {
        view: {
            engine: {
                str(tp): {
                    "level": verdict(findings).value,
                    "reasons": [
                        {"level": f.level.value, "rule": f.rule, "message": f.message, "source": f.source}
                        for f in findings
                        if f.level is not Level.OK
                    ],
                }
                for tp, findings in by_tp.items()
            }
            for engine, by_tp in check_all(
                configs[view],
                quantization_of(configs[view]),
                sizes=TENSOR_PARALLEL,
                modules=modules,
            ).items()
        }
        for view in VIEWS
    }
