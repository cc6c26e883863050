"""Our adapter in float32 against lm-eval's own ``hf`` on the float32 numbers of the same view: every item.

    python bench/eval/oracle.py [--model tiny-glm] [--suite quick] [--limit N] [--json FILE]

Both paths, and all tasks of the suite. Accuracies must be equal item by item; perplexities (of a task) within
1e-3, relative. Answers whose JSON schema is enforced are left out, since ``hf`` enforces none. Float32 in our
engine is plain torch, slow: all items of ``quick`` take half an hour or so; ``--limit`` takes items spread over
each task.

Where an item differs, its task is scored once more with one thing made the same: a DSA indexer gives many
positions a score of exactly 0 (a sum of ReLUs), so that of those that are equal at the cut only some are chosen.
Ours takes the first ones, always; ``hf`` those that ``torch.topk`` happens to give, which promises no order.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from peer import evaluated, hf, write_float32_copy

from measure import Row, write_rows
from quantkit_evals.candidates.engine import EngineCandidate
from quantkit_evals.configuration import Configuration
from quantkit_evals.configuration import Path as ScoringPath
from quantkit_evals.harness.run_tasks import run_tasks
from quantkit_evals.run import Metric, Run
from quantkit_evals.tasks import find_tasks
from quantkit_serve.start.servable import Servable, servable

RELATIVE = 1e-3


def as_torch_chooses(scores: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    """``index_topk`` with another choice of equal scores; positions ascending, then -1."""
    hidden = torch.arange(scores.shape[1]) >= visible[:, None]
    found = scores.masked_fill(hidden, -math.inf).topk(min(k, scores.shape[1]), dim=1).indices
    found = found.masked_fill(found >= visible[:, None], scores.shape[1]).sort(dim=1).values
    return found.masked_fill(found == scores.shape[1], -1).int()


def tasks_of(suite: str) -> list[Any]:
    found = find_tasks([], suite=suite)
    return [task for task in found if not any("json_schema" in doc for doc in task.lm_eval_task().eval_docs)]


def chosen_of(run: Run, task: Any) -> list[int]:
    """Numbers of the documents that a run has."""
    ids = {item.item for item in run.items_of(task.name)}
    source = task.lm_eval_task()
    return [number for number, doc in enumerate(source.eval_docs) if str(source.item_id(doc)) in ids]


def score(metric: Metric, values: list[float], weights: list[float]) -> float:
    mean = math.fsum(values) / math.fsum(weights)
    return math.exp(mean) if metric.kind == "perplexity" else mean


def rows_of(run: Run, how: str, task: Any, peer: dict[int, dict[str, Any]]) -> list[Row]:
    items, rows = run.items_of(task.name), []
    for metric in task.metrics:
        ours = [item.values[metric.name] for item in items]
        raw = [peer[number][metric.name.partition(",")[0]] for number in sorted(peer)]
        pairs = [value if isinstance(value, tuple | list) else (value, 1.0) for value in raw]
        theirs = [-float(value) if metric.kind == "perplexity" else float(value) for value, _ in pairs]
        weights = [item.weight(metric.name) for item in items]
        if weights != [float(weight) for _, weight in pairs]:
            raise SystemExit(f"{task.name}.{metric.name}: the weights differ")
        figures = score(metric, ours, weights), score(metric, theirs, weights)
        name = f"{task.name}.{metric.name}, {how}, {len(items)} items"
        if metric.kind == "perplexity":
            holds = abs(figures[0] - figures[1]) <= RELATIVE * figures[1]
            rows.append(Row(name, figures[0], metric.unit, "hf", figures[1], "within 1e-3", holds))
            continue
        differ = sum(a != b for a, b in zip(ours, theirs, strict=True))
        rows.append(Row(name, figures[0], "", "hf", figures[1]))
        rows.append(Row(f"{name}: that differ", differ, "items", target="0", holds=differ == 0))
    return rows


def ours(model: Servable, path: ScoringPath, tasks: list[Any], limit: int | None) -> Run:
    """A candidate of its own, without kept answers."""
    return run_tasks(EngineCandidate(model, Configuration("fp8", "f32", path, "float32")), tasks, limit=limit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-glm")
    parser.add_argument("--suite", default="quick")
    parser.add_argument("--limit", type=int, help="items of each task (default: all)")
    parser.add_argument("--json")
    args = parser.parse_args()
    model, tasks = servable(args.model), tasks_of(args.suite)
    runs = {path: ours(model, path, tasks, args.limit) for path in ("prefill", "decode")}
    with tempfile.TemporaryDirectory(prefix="quantkit-bench-") as scratch:
        copy = write_float32_copy(model.folder / "prefill", Path(scratch, "float32"))
        chosen = {task.name: chosen_of(runs["prefill"], task) for task in tasks}
        peer = evaluated(hf(copy, "float32", 16), [task.lm_eval_task() for task in tasks], chosen)
    rows, odd = [], []
    for path, run in runs.items():
        for task in tasks:
            found = rows_of(run, f"{path} path", task, peer[task.name])
            rows += found
            odd += [task] if not all(row.holds in (None, True) for row in found) and task not in odd else []
    if odd:
        with patch("quantkit_serve.model.reference_ops.index_topk", as_torch_chooses):
            run = ours(model, "prefill", odd, args.limit)
        for task in odd:
            rows += rows_of(run, "prefill path, equal index scores as torch chooses", task, peer[task.name])
    write_rows(rows, args.json)


if __name__ == "__main__":
    main()
