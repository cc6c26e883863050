"""Weights that a quality budget had tried again: by layer, by what gave the result, each by its name.

A retry of a calibrated weight stands in its record. That of an ``rtn`` weight shows in its method, ``mse``, which
the recipe does not ask for; so the recipe is read as planning reads it (``plan.treatments``): the first override
whose pattern is found in the name of the module counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..records import TensorRecord

WAYS = {"dampening": "with ten times the dampening", "mse": "by mse"}


class Retries:
    """Gathers them record by record.

    Args:
        recipe: as the manifest has it.

    Attributes:
        are_asked: the recipe's budget has weights over their limit tried again.
    """

    def __init__(self, recipe: Mapping[str, Any]) -> None:
        self.are_asked = "retry" in (recipe.get("budget") or {}).get("action", ())
        self._usual: str = recipe["decode"]["method"]
        self._overrides = [(re.compile(o["pattern"]), o["method"]) for o in recipe.get("overrides", ())]
        self._found: dict[str, dict[str, list[str]]] = {}

    def add(self, record: TensorRecord) -> None:
        """One line of ``tensors.jsonl``."""
        if self.are_asked and (way := self._way(record)) is not None:
            layer = "none" if record.layer is None else str(record.layer)
            self._found.setdefault(layer, {}).setdefault(way, []).append(record.name)

    def to_json(self) -> dict[str, Any]:
        """``retried``: layer -> ``dampening`` or ``mse`` -> names, in the source's order; {} if none are asked."""
        return {"retried": self._found} if self.are_asked else {}

    def _way(self, record: TensorRecord) -> str | None:
        outcome = record.decode
        if outcome.calibration is not None:
            way: str | None = outcome.calibration.get("retry")
            return way
        return "mse" if outcome.method == "mse" and self._asked(record.name) == "rtn" else None

    def _asked(self, name: str) -> str:
        module = name.rpartition(".")[0]
        found = next((method for pattern, method in self._overrides if pattern.search(module)), None)
        return found or self._usual


def count_by_way(layers: Mapping[str, Mapping[str, list[str]]]) -> str:
    """Such as "12 with ten times the dampening, 3 by mse"."""
    counts = {way: sum(len(row.get(way, ())) for row in layers.values()) for way in WAYS}
    return ", ".join(f"{count:,} {WAYS[way]}" for way, count in counts.items() if count) or "none"
