"""Runs for tests of what is computed from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quantkit_evals.run import Item, Metric, Run, Task

ACC = Metric("acc", "accuracy", True, "%")
PERPLEXITY = Metric("perplexity", "perplexity", False, "")
KL = Metric("kl", "mean", False, "nats/token", is_of_pair=True)
SEED = {"seed": 0, "limit": None}


def digest(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()


def items(
    task: str,
    values: Mapping[str, Sequence[float]],
    *,
    weights: Mapping[str, Sequence[float]] | None = None,
    per_cluster: int = 1,
) -> list[Item]:
    """One item per position of the values; ``per_cluster`` neighbours share a cluster."""
    count = len(next(iter(values.values())))
    return [
        Item(
            task=task,
            item=f"i{i}",
            cluster=f"c{i // per_cluster}",
            prompt_sha256=digest(f"{task} {i}"),
            values={name: float(column[i]) for name, column in values.items()},
            weights={name: float(column[i]) for name, column in (weights or {}).items()},
        )
        for i in range(count)
    ]


def task(name: str, *metrics: Metric, **fields: Any) -> Task:
    return Task(name, digest(name), fields.pop("path", "decode"), metrics or (ACC,), **fields)


def run(label: str, tasks: Sequence[Task], items: Sequence[Item], **settings: Any) -> Run:
    return Run({"label": label, "kind": "engine"}, {**SEED, **settings}, tuple(tasks), tuple(items))
