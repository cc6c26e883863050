"""Figure 2: what FP8 pages buy: tokens in the same memory, and throughput where memory limits the requests.

    python bench/serve/kv.py [--size mid|small] [--models DIR] [--json FILE.json] [glm|qwen ...]

The pool is as large as ``AT_ONCE`` requests of the load need in BF16. Both engines get all requests at once; they
admit as many as fit, and take turns.
"""

from __future__ import annotations

import sys
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


def pool_bytes(artifact: Path, tokens: int) -> int:
    """Memory in which ``AT_ONCE`` requests of so many tokens fit in BF16, and not one more."""
    page_size = CONFIG.cache.page_size
    pages = -(-tokens // page_size)
    return AT_ONCE * pages * open_engine(artifact, kv_dtype="bf16").facts.page_bytes


def tokens_held(engine: Engine) -> int:
    return engine.pool.num_pages * engine.config.cache.page_size


def capacity_row(name: str, ratio: float) -> Row:
    if name == "glm":
        return Row("  fp8 over bf16", ratio, "x", None, None, f">= {MLA_TARGET:.2f}", ratio >= MLA_TARGET)
    ideal = 2 * model.HEAD_DIM / (model.HEAD_DIM + 4)
    return Row(
        "  fp8 over bf16", ratio, "x", "2d/(d+4)", ideal, f">= {GQA_SHARE:.0%} of it", ratio >= GQA_SHARE * ideal
    )


def of_model(name: str, options: Options) -> list[Row]:
    artifact = model.artifact(name, options)
    large = {kind: open_engine(artifact, kv_dtype=kind) for kind in KINDS}
    held = {kind: tokens_held(engine) for kind, engine in large.items()}
    input_len, output_len = (56, 8) if options.is_small else (128, 256)
    memory = pool_bytes(artifact, input_len + output_len)
    engines = {kind: open_engine(artifact, kv_dtype=kind, kv_bytes=memory) for kind in KINDS}
    best: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    most: dict[str, int] = dict.fromkeys(KINDS, 0)
    for number, kind in in_turns(KINDS, 1 if options.is_small else 3):
        engine = engines[kind]
        found = run(engine, same_load(4 * AT_ONCE, input_len, output_len, seed=number))
        best[kind] = max(best[kind], found.output_throughput)
        most[kind] = max(sequences for *_, sequences, _ in engine.figures().steps)
    gain = best["fp8"] / best["bf16"]
    return [
        Row(f"{name}: in {CONFIG.cache.kv_bytes >> 20} MiB, fp8", held["fp8"], "tokens", "bf16", held["bf16"]),
        capacity_row(name, large["bf16"].facts.page_bytes / large["fp8"].facts.page_bytes),
        Row(f"{name}: requests at once in {memory / 2**20:.0f} MiB, fp8", most["fp8"], "", "bf16", most["bf16"]),
        Row(f"{name}: throughput with that pool, fp8", best["fp8"], "tok/s", "bf16", best["bf16"]),
        Row("  fp8 over bf16", gain, "x", None, None, f">= {THROUGHPUT_TARGET:.2f}", gain >= THROUGHPUT_TARGET),
    ]  # fmt: skip


def rows(options: Options) -> list[Row]:
    return [row for name in options.names or NAMES for row in of_model(name, options)]


if __name__ == "__main__":
    script(rows, __doc__, names=NAMES)
