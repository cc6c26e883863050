"""How the figures of ``quantkit bench serve`` are laid out for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .console import Block, Table

if TYPE_CHECKING:
    from quantkit_serve.load.result import LevelResult, LoadResult

_LATENCIES = (
    ("time to first token", "ttft_ms"),
    ("time per output token", "tpot_ms"),
    ("between tokens", "itl_ms"),
    ("end to end", "e2e_ms"),
)
_SHOWN = 10  # kinds of failure of a level; the JSON has all


def load(result: LoadResult) -> Iterator[Block]:
    """The tables of a sweep."""
    ends = "to that length" if result.ignores_eos else "or to the model's end"
    yield f"server     {result.url}, model {result.model}"
    yield (
        f"requests   {result.num_prompts:,} a level, {result.prompts} prompts of {result.input_len:,} tokens, "
        f"answers of {result.output_len:,} {ends}, seed {result.seed}"
    )
    is_priced = result.price_per_hour is not None
    costs = (">cost / M output", ">cost / M tokens") if is_priced else ()
    columns = (
        _axis(result), ">answered", ">failed", ">short", ">seconds", ">requests/s", ">output tok/s", ">tok/s",
        *costs,
    )  # fmt: skip
    yield Table("Throughput", columns, [_throughput(level, is_priced) for level in result.levels])
    rows = [row for level in result.levels for row in _latency(level)]
    yield Table("Latency, ms", (_axis(result), "", ">mean", ">median", ">95 %", ">99 %"), rows)


def failures(result: LoadResult) -> Iterator[str]:
    """What must not be overlooked: requests that failed, and answers that are shorter than asked for."""
    for level in result.levels:
        where = f"{_axis(result)} {level.label}"
        kinds = list(level.failures.items())
        for why, count in kinds[:_SHOWN]:
            yield f"{where}: {count:,} of {level.answered + level.failed:,} requests failed: {why}"
        if rest := kinds[_SHOWN:]:
            yield f"{where}: {sum(n for _, n in rest):,} more failed for {len(rest)} other reasons"
        if level.short and result.ignores_eos:
            yield f"{where}: {level.short:,} answers are shorter than {result.output_len:,} tokens"


def _axis(result: LoadResult) -> str:
    return "concurrency" if result.levels[0].rate is None else "rate"


def _throughput(level: LevelResult, is_priced: bool) -> list[str]:
    costs = (level.cost_per_million_output, level.cost_per_million_total)
    return [
        level.label, f"{level.answered:,}", f"{level.failed:,}", f"{level.short:,}", f"{level.duration_s:.1f}",
        *(_figure(rate) for rate in (level.request_throughput, level.output_throughput, level.total_throughput)),
        *(("" if cost is None else f"{cost:,.4g}") for cost in costs if is_priced),
    ]  # fmt: skip


def _latency(level: LevelResult) -> Iterator[list[str]]:
    label = level.label
    for name, field in _LATENCIES:
        summary = getattr(level, field)
        if summary is not None:
            yield [label, name, *(_figure(v) for v in (summary.mean, summary.median, summary.p95, summary.p99))]
            label = ""


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
