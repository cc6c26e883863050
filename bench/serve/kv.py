"""Figure 2: what FP8 pages buy: tokens in the same memory, and throughput where memory limits the requests.

    python bench/serve/kv.py [--size mid|small] [--models DIR] [--json FILE.json] [glm|qwen ...]

The pool is as large as ``AT_ONCE`` requests of the load need in BF16. Either engine runs as many at once as fit to
their ends (nobody is preempted) and gets twice as many, so that it is full nearly all the time; they take turns.

What bounds the gain is shown as well: a decode step of all rows of either engine, the gain if there were nothing
else, and the share of prefill, which is the same work for every request however many run.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import model
from harness import CONFIG, in_turns, open_engine, run, same_load
from options import Options, script

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measure import Row
from quantkit_serve.config import KvDtype
from quantkit_serve.engine.engine import Engine

NAMES = ("glm", "qwen")
KINDS: tuple[KvDtype, ...] = ("fp8", "bf16")
AT_ONCE = 8  # requests that fit in BF16
MLA_TARGET, GQA_SHARE, THROUGHPUT_TARGET = 1.70, 0.90, 1.30


def pages_of(tokens: int) -> int:
    return -(-tokens // CONFIG.cache.page_size)


def limited(artifact: Path, kind: KvDtype, kv_bytes: int, tokens: int) -> Engine:
    """An engine that runs as many requests of so many tokens as fit."""
    page_bytes = open_engine(artifact, kv_dtype=kind).facts.page_bytes
    at_once = kv_bytes // page_bytes // pages_of(tokens)
    config = replace(CONFIG, scheduler=replace(CONFIG.scheduler, max_num_seqs=at_once))
    return open_engine(artifact, kv_dtype=kind, kv_bytes=kv_bytes, config=config)


def tokens_held(engine: Engine) -> int:
    return engine.pool.num_pages * engine.config.cache.page_size


def capacity_row(name: str, ratio: float) -> Row:
    if name == "glm":
        return Row("  fp8 over bf16", ratio, "x", None, None, f">= {MLA_TARGET:.2f}", ratio >= MLA_TARGET)
    ideal = 2 * model.HEAD_DIM / (model.HEAD_DIM + 4)
    return Row(
        "  fp8 over bf16", ratio, "x", "2d/(d+4)", ideal, f">= {GQA_SHARE:.0%} of it", ratio >= GQA_SHARE * ideal
    )


@dataclass(frozen=True)
class Steps:
    """Of the latest steps of an engine, as many as it keeps.

    Attributes:
        decode_s: of a step with all rows, median.
        prefill_share: of the seconds of all steps.
    """

    decode_s: float
    prefill_share: float

    @classmethod
    def of(cls, engine: Engine, rows: int) -> Steps:
        steps = engine.figures().steps
        seconds = {phase: sum(s for _, s, kind, *_ in steps if kind == phase) for phase in ("prefill", "decode")}
        full = [s for _, s, kind, count, _ in steps if kind == "decode" and count == rows]
        return cls(statistics.median(full), seconds["prefill"] / sum(seconds.values()))


def of_model(name: str, options: Options) -> list[Row]:
    artifact = model.artifact(name, options)
    large = {kind: open_engine(artifact, kv_dtype=kind) for kind in KINDS}
    held = {kind: tokens_held(engine) for kind, engine in large.items()}
    input_len, output_len = (56, 8) if options.is_small else (128, 192)
    tokens = input_len + output_len
    memory = AT_ONCE * pages_of(tokens) * large["bf16"].facts.page_bytes
    engines = {kind: limited(artifact, kind, memory, tokens) for kind in KINDS}
    most = {kind: engine.config.scheduler.max_num_seqs for kind, engine in engines.items()}
    best: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    for number, kind in in_turns(KINDS, 1 if options.is_small else 3):
        found = run(engines[kind], same_load(2 * most[kind], input_len, output_len, seed=number))
        best[kind] = max(best[kind], found.output_throughput)
    if any(engine.figures().preemptions for engine in engines.values()):
        raise RuntimeError("requests were preempted, so the pool did not hold what it should")
    gain = best["fp8"] / best["bf16"]
    steps = {kind: Steps.of(engine, most[kind]) for kind, engine in engines.items()}
    decode_ms = {kind: 1e3 * found.decode_s for kind, found in steps.items()}
    prefill = {kind: 100 * found.prefill_share for kind, found in steps.items()}
    of_decode = most["fp8"] / decode_ms["fp8"] / (most["bf16"] / decode_ms["bf16"])
    return [
        Row(f"{name}: in {CONFIG.cache.kv_bytes >> 20} MiB, fp8", held["fp8"], "tokens", "bf16", held["bf16"]),
        capacity_row(name, large["bf16"].facts.page_bytes / large["fp8"].facts.page_bytes),
        Row(f"{name}: requests at once in {memory / 2**20:.0f} MiB, fp8", most["fp8"], "", "bf16", most["bf16"]),
        Row(f"{name}: throughput with that pool, fp8", best["fp8"], "tok/s", "bf16", best["bf16"]),
        Row("  fp8 over bf16", gain, "x", None, None, f">= {THROUGHPUT_TARGET:.2f}", gain >= THROUGHPUT_TARGET),
        Row("  a decode step of all, fp8", decode_ms["fp8"], "ms", "bf16", decode_ms["bf16"]),
        Row("  fp8 over bf16 if there were nothing but these", of_decode, "x"),
        Row("  share of prefill, fp8", prefill["fp8"], "%", "bf16", prefill["bf16"]),
    ]  # fmt: skip


def rows(options: Options) -> list[Row]:
    return [row for name in options.names or NAMES for row in of_model(name, options)]


if __name__ == "__main__":
    script(rows, __doc__, names=NAMES)
