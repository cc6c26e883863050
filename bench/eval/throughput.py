"""Items per second of a suite: our engine, decode-forced and by prefill, against lm-eval's own ``hf``.

    python bench/eval/throughput.py [--model tiny-glm] [--suite quick] [--limit N] [--repeats 3] [--json FILE]

The same items, machine and number of threads; models are loaded before. The two take turns, and the ratio is of
medians. ``hf`` runs a BF16 copy with the batch size that is its fastest of a few on a part of the items. Both time
what a user waits for: building prompts, tokens, the model, judging. Answers whose JSON schema is enforced are left
out, since ``hf`` enforces none and would be asked for something else.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from oracle import chosen_of, tasks_of
from peer import evaluated, hf

from measure import Row, write_rows
from quantkit_evals.candidates.engine import EngineCandidate
from quantkit_evals.choice import DECODED_CONTEXT
from quantkit_evals.configuration import Configuration
from quantkit_evals.dequantized import write_bf16_copy
from quantkit_evals.harness.run_tasks import run_tasks
from quantkit_evals.run import Run
from quantkit_serve.start.servable import servable

TARGET = 2.0
BATCH_SIZES = (1, 8, 32)
PROBE = 32  # items of each task; of eight the choice is luck
CONFIGURATIONS = {
    "dual, decode path": Configuration("dual", "fp8", "decode"),
    "fp8, prefill path": Configuration("fp8", "bf16", "prefill"),
}


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-glm")
    parser.add_argument("--suite", default="quick")
    parser.add_argument("--limit", type=int, help="items of each task (default: all)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json")
    args = parser.parse_args()
    model, tasks = servable(args.model), tasks_of(args.suite)
    ours = {
        name: EngineCandidate(model, configuration, decoded_context=DECODED_CONTEXT)  # as the command has it
        for name, configuration in CONFIGURATIONS.items()
    }
    with tempfile.TemporaryDirectory(prefix="quantkit-bench-") as scratch:
        copy = write_bf16_copy(model.folder / "prefill", Path(scratch, "bf16"))
        probe = run_tasks(next(iter(ours.values())), tasks, limit=PROBE)  # loads it, too
        sizes = {size: seconds(lambda size=size: theirs(copy, size, tasks, probe)()) for size in BATCH_SIZES}
        best = min(sizes, key=sizes.__getitem__)
        whole = run_tasks(ours["fp8, prefill path"], tasks, limit=args.limit)
        peer = theirs(copy, best, tasks, whole)
        times: dict[str, list[float]] = {name: [] for name in (*ours, "hf")}
        for _ in range(args.repeats):
            for name, candidate in ours.items():
                times[name].append(seconds(lambda c=candidate: run_tasks(c, tasks, limit=args.limit)))
            times["hf"].append(seconds(peer))
    write_rows(rows_of(times, len(whole.items), best), args.json)


def theirs(copy: Path, batch_size: int, tasks: list[Any], run: Run) -> Callable[[], Any]:
    """lm-eval on the items of a run; the model is loaded now."""
    chosen = {task.name: chosen_of(run, task) for task in tasks}
    model = hf(copy, "bfloat16", batch_size)
    return lambda: evaluated(model, [task.lm_eval_task() for task in tasks], chosen)


def rows_of(times: dict[str, list[float]], num_items: int, batch_size: int) -> list[Row]:
    rates = {name: num_items / statistics.median(found) for name, found in times.items()}
    peer = f"hf, batches of {batch_size}"
    rows = [
        Row(f"{name}, {num_items} items", rates[name], "items/s", peer, rates["hf"]) for name in CONFIGURATIONS
    ]
    for name in CONFIGURATIONS:
        ratio = rates[name] / rates["hf"]
        rows.append(Row(f"{name} over hf", ratio, "x", target=f">= {TARGET:g}", holds=ratio >= TARGET))
    return rows


if __name__ == "__main__":
    main()
