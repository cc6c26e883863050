"""What comes with quantkit to evaluate with, as one JSON-ready table: tasks, suites, gates."""

from __future__ import annotations

from typing import Any

from .evaluation import SUITE
from .tasks.find import FIDELITY


def catalogue() -> dict[str, list[dict[str, Any]]]:
    """``tasks``, ``suites`` and ``gates``, each sorted by name."""
    from .gate import find_gate, gate_names
    from .tasks import find_tasks, task_names
    from .tasks.find import read_suites

    tasks = [
        {
            "name": task.name, "description": task.description, "items": task.num_items,
            "paths": list(task.paths), "metrics": [m.name for m in task.metrics],
            "version": task.version,
        }
        for task in find_tasks(task_names())
    ]  # fmt: skip
    tasks.append(_fidelity())
    gates = [(name, find_gate(name)) for name in gate_names()]
    return {
        "tasks": tasks,
        "suites": [
            {
                "name": name, "description": suite.description,
                "tasks": [*([FIDELITY] if name == SUITE else []), *(entry.task for entry in suite.tasks)],
            }
            for name, suite in sorted(read_suites().suites.items())
        ],
        "gates": [
            {"name": name, "description": gate.description, "rules": len(gate.rules), "sha256": gate.sha256}
            for name, gate in gates
        ],
    }  # fmt: skip


def _fidelity() -> dict[str, Any]:
    from .candidates.fidelity_task import METRICS, FidelityText

    return {
        "name": FIDELITY, "description": "divergence from the baseline, token by token, on held-out text",
        "items": FidelityText().num_blocks, "paths": ["prefill", "decode"], "metrics": [m.name for m in METRICS],
        "version": None,
    }  # fmt: skip
