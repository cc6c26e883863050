"""What was compared, exactly: everything a run states of its candidate and its settings, none of it left out.

The keys of a candidate differ by its kind (our engine, transformers, an endpoint), and a later one may have more:
all are shown, in the order of the document, nested ones by their path.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..configuration import Configuration
from ..run import Run, Task

ACTIVATIONS = {"none": "16-bit activations", "dynamic128": "FP8 activations (dynamic, 128 wide)"}
UNSTATED = "not stated"


def configuration(run: Run) -> Configuration | None:
    """Of our engine; None for candidates that have none, or one that this version does not know."""
    return Configuration.of_json(run.candidate.get("configuration"))


def activations(run: Run) -> str:
    """The activation mode of a run's figures, in words."""
    found = configuration(run)
    if found is None:
        return UNSTATED
    words = ACTIVATIONS.get(found.fp8_activations, found.fp8_activations)
    return words.replace("16-bit", "float32") if found.compute == "float32" else words


def path(run: Run, task: str, stated: str) -> str:
    """``decode, 16-bit activations``: by which path a figure was made, and in which arithmetic."""
    mode = activations(run)
    return stated if mode == UNSTATED else f"{stated}, {mode}"


def is_blind(run: Run, task: Task) -> bool:
    """Whether a task's figures can't show what is under test: it never enters decode, and should."""
    found = configuration(run)
    return found is not None and found.needs_decode and task.path == "prefill"


def scored_tokens(run: Run, task: str) -> tuple[int, int] | None:
    """(tokens scored, those of them that a decode step gave) of a task; None where the run does not say."""
    stated = run.candidate.get("scored_tokens")
    found = stated.get(task) if isinstance(stated, Mapping) else None
    counts = (found.get("tokens"), found.get("decoded")) if isinstance(found, Mapping) else (None, None)
    tokens, decoded = counts
    return (tokens, decoded) if isinstance(tokens, int) and isinstance(decoded, int) else None


def facts(run: Run) -> dict[str, str]:
    """Name -> value of all that is stated of a candidate."""
    found = {"label": run.label}
    for name, value in run.candidate.items():
        found |= dict(_flat(str(name), value))
    return found | {"activations": activations(run)}


def settings(run: Run) -> dict[str, str]:
    """Name -> value of all that else decides the figures."""
    return {name: text for key, value in run.settings.items() for name, text in _flat(str(key), value)}


def side_by_side(columns: Sequence[Mapping[str, str]]) -> Iterator[list[str]]:
    """Rows (name, value of each column) of all names, in the order in which they first come."""
    for name in dict.fromkeys(name for column in columns for name in column):
        yield [name, *(column.get(name, UNSTATED) for column in columns)]


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner)
    elif isinstance(value, str):
        yield name, value
    else:
        yield name, json.dumps(value, ensure_ascii=False, default=str)
