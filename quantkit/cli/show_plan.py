"""How a plan is laid out for people: fates, sizes, cost, what decoding reads, capacity, engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..units import format_bytes, format_gb, format_gib, format_seconds
from .console import Block, Table
from .show_report import override_text

Summary = Mapping[str, Any]
_VIEWS = ("prefill", "decode")


def plan(summary: Summary, *, all_reasons: bool = False) -> Iterator[Block]:
    """``quantkit plan`` from the dictionary of ``quantkit.plan.summary``."""
    source = summary["source"]
    at = f" at {source['revision']}" if source["revision"] else ""
    yield f"source     {source['label']}{at} ({source['kind']}), family {summary['family']}"
    yield f"recipe     {summary['recipe']['name']}: {_recipe(summary['recipe'])}"
    yield from _treatments(summary)
    yield f"plan       {summary['plan_id']}"
    yield _fates(summary)
    yield _sizes(summary["sizes"])
    yield ""
    yield from _cost(summary)
    if summary["decode_reads"] is not None:
        yield _reads(summary["decode_reads"])
        yield f"speed-up bound of decoding {summary['decode_reads']['speedup_bound_shown']}: " + (
            "one sequence, weights only; the KV cache and larger batches make it less"
        )
    if summary["kv_cache"] is not None:
        yield _kv_cache(summary["kv_cache"])
    if summary["capacity"] is not None:
        yield _capacity(summary["capacity"])
    if summary["engines"] is not None:
        yield from _engines(summary["engines"], all_reasons)
    for section, why in summary["unknown"].items():
        yield f"not known: {section.replace('_', ' ')} ({why})"


def _recipe(recipe: Summary) -> str:
    decode = recipe["decode"]
    said = (
        f"{decode['scheme']} in groups of {decode['group_size']}, {decode['method']}, linears {decode['linears']}"
    )
    layers = "all layers" if decode["layers"] is None else f"layers {_ranges(decode['layers'])}"
    derived = ", FP8 derived" if recipe["prefill"]["make_fp8"] else ""
    return f"{said}, {layers}, rest {decode['rest']}, MTP {decode['mtp']}{derived}"


def _treatments(summary: Summary) -> Iterator[str]:
    """How many modules each method has and how many each override decided; the quality budget."""
    overrides, budget = summary["recipe"].get("overrides", ()), summary["recipe"].get("budget")
    if summary["methods"]:
        said = [
            f"{row['modules']:,} {row['method']} in groups of {row['group_size']}" for row in summary["methods"]
        ]
        yield f"modules    {', '.join(said)}"
    for override, caught in zip(overrides, summary["overrides_caught"], strict=True):
        yield f"override   {override['pattern']}: {override_text(override)}, {caught:,} modules"
    if budget is not None:
        yield f"budget     {_budget(budget)}"


def _budget(budget: Summary) -> str:
    most = budget["max_relative_error"]
    limits = (
        ", ".join(f"{p} {limit:g}" for p, limit in most.items() if limit is not None)
        if isinstance(most, Mapping)
        else f"{most:g}"
    )
    actions = {"fail": "fail", "retry": "try again", "keep-fp8": "keep the layer"}
    last = [] if budget["action"][-1] != "retry" else ["fail"]
    over = ", then ".join([*(actions[action] for action in budget["action"]), *last])
    return f"relative error of routed experts' weights at most {limits}; over it: {over}"


def _ranges(numbers: list[int]) -> str:
    """``3-5,7`` of sorted numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def _fates(summary: Summary) -> Table:
    fates = summary["fates"]
    rows = [
        [
            role,
            f"{sum(fates['decode'][role].values()):,}",
            *(", ".join(f"{action} {n:,}" for action, n in fates[view].get(role, {}).items()) for view in _VIEWS),
        ]
        for role in fates["decode"]
    ]
    title = f"What becomes of {summary['tensors']:,} tensors"
    return Table(title, ("role", ">tensors", "prefill view", "decode view"), rows)


def _sizes(sizes: Summary) -> Table:
    columns = ("source", *_VIEWS)
    roles = {role for c in columns for role in sizes[c]["by_role"]}
    size = {(c, role): sum(sizes[c]["by_role"].get(role, {}).values()) for c in columns for role in roles}
    order = sorted(roles, key=lambda role: -size["source", role])
    rows = [[role, *(format_bytes(size[c, role]) for c in columns)] for role in order]
    rows.append(["all tensors", *(format_bytes(sizes[c]["tensor_bytes"]) for c in columns)])
    rows.append(
        ["weight files", *(f"{format_bytes(sizes[c]['file_bytes'])} in {sizes[c]['files']}" for c in columns)]
    )
    return Table("Sizes", ("role", ">source", ">prefill view", ">decode view"), rows)


def _cost(summary: Summary) -> Iterator[str]:
    memory, disk, time = summary["memory"], summary["disk"], summary["time"]
    how = f"{memory['workers']} threads, {memory['backend']} kernels"
    calibrated = summary.get("calibration") is not None
    apart = ", calibration not counted" if calibrated else ""
    yield f"memory     {format_gib(memory['peak_bytes'])} at its peak{apart}, {how}"
    placed = {"none": "both views are derived"}.get(disk["placement"], f"publisher's files by {disk['placement']}")
    free = f"{format_bytes(disk['free_bytes'])} free in {disk['target']}"
    yield f"disk       {format_bytes(disk['needed_bytes'])} needed ({placed}), {free}"
    if disk["download_bytes"]:
        yield f"download   {format_bytes(disk['download_bytes'])}"
    if disk["problem"]:
        yield f"           {disk['problem']}"
    if calibrated:
        yield f"calibrated {_calibration(summary['calibration'])}"
        yield f"           {_learning(summary['calibration'])}"
    without = f", without {' and '.join(time['excludes'])}" if time["excludes"] else ""
    most = time["calibration_seconds"]
    part = f", {format_seconds(most)} of it calibration on the CPU" if most is not None else ""
    yield f"time       about {format_seconds(time['seconds'])}{part} (within a factor of two{without})"


def _calibration(found: Summary) -> str:
    experts = found["tokens_per_expert"]
    each = f", {experts:,.0f} tokens per expert if routed evenly" if experts is not None else ""
    return (
        f"with {found['samples']:,} samples of {found['length']:,} tokens, {found['data']}{each}; hidden states "
        f"{format_gib(found['hidden_state_bytes'])}"
    )


def _learning(found: Summary) -> str:
    """How the recipe's calibration section lets the methods learn."""
    starved = f"experts of fewer than {found['min_tokens']:,} tokens borrow from their layer's average"
    return ", ".join((
        f"seed {found['seed']}", "every expert learns from all tokens" if found["route_all"] else starved,
        f"down behind {found['down_inputs']} gate and up", f"layers behind {found['propagate']} ones",
        f"dampening {found['percdamp']:g}",
    ))  # fmt: skip


def _reads(reads: Summary) -> Table:
    rows = [[role, format_gb(n), format_gb(reads["int4"].get(role, 0))] for role, n in reads["fp8"].items()]
    rows.append(["all", format_gb(reads["fp8_bytes"]), format_gb(reads["int4_bytes"])])
    experts = f"{reads['experts_per_token']} of {reads['experts']} experts"
    return Table(f"Weight bytes read per decoded token ({experts})", ("role", ">FP8", ">INT4"), rows)


def _kv_cache(kv: Summary) -> Table:
    kinds = [
        ("quantkit pages (scales inside)", ""),
        ("bytes of the numbers alone", "plain_"),
        ("vLLM, SGLang", "engine_"),
    ]
    rows = [
        [name, *(f"{kv[f'{key}{dtype}_bytes']:,}" for dtype in ("bf16", "fp8"))]
        for name, key in kinds
        if kv[f"{key}fp8_bytes"] is not None
    ]
    return Table(f"KV cache, bytes per token ({kv['kind']})", ("", ">BF16", ">FP8"), rows)


def _capacity(found: Summary) -> Table:
    gpus = f"{found['gpus']} x {found['gpu']}, {format_gib(found['usable_bytes_per_gpu'])} usable on each"
    rows = [
        [
            {"both": "both views on the same GPUs"}.get(row["weights"], f"{row['weights']} view"),
            format_gib(row["weight_bytes_per_gpu"]),
            *((f"{row['tokens'][d]:,}" for d in ("bf16", "fp8")) if not row["problem"] else ("", "")),
            row["problem"] or "",
        ]
        for row in found["rows"]
    ]
    columns = ("weights", ">per GPU", ">tokens, BF16 KV", ">tokens, FP8 KV", "")
    return Table(f"Tokens of context that fit ({gpus})", columns, rows)


def _engines(engines: Summary, all_reasons: bool) -> Iterator[Block]:
    rows = []
    for view in _VIEWS:
        for engine, by_tp in engines[view].items():
            at = {level: [tp for tp, v in by_tp.items() if v["level"] == level] for level in ("ok", "warn", "no")}
            rows.append([view, engine, *(", ".join(at[level]) or "-" for level in ("ok", "warn", "no"))])
    columns = ("view", "engine", "loads at TP", "with a warning", "not at TP")
    yield Table("Engines and tensor-parallel sizes", columns, rows)
    for view in _VIEWS:
        for engine, by_tp in engines[view].items():
            reasons = [(tp, r["message"]) for tp, v in by_tp.items() for r in v["reasons"]]
            for tp, message in reasons if all_reasons else reasons[:1]:
                yield f"{view}, {engine}, TP {tp}: {message}"
            if len(reasons) > 1 and not all_reasons:
                yield f"  ... and {len(reasons) - 1} more; -v shows all"
