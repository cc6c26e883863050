"""Calibration in figures: what every expert saw, what that gave, and every weight that was not treated as asked.

Per layer there are parallel lists, one entry per calibrated expert in the order of ``experts``: a model of 20,000
experts stays a document of some MB. Weights outside the experts enter the sums of their layer only. Computing time
is no part of a record (it would make core bytes differ from run to run), so none is reported.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from math import sqrt
from statistics import median
from typing import TYPE_CHECKING, Any

from ..canonical import round_figure

if TYPE_CHECKING:
    from ..records import TensorRecord


@dataclass(slots=True)
class _Expert:
    """The weights of one expert."""

    tokens: int = 0
    routed: int | None = None
    is_shrunk: bool = False
    squares: float = 0.0  # of relative errors
    weights: int = 0
    gains: list[float] = field(default_factory=list)

    def add(self, facts: dict[str, Any], error: float) -> None:
        self.tokens, self.is_shrunk = facts["tokens"], self.is_shrunk or facts["shrunk"]
        self.routed = facts.get("routed_tokens")
        self.squares, self.weights = self.squares + error * error, self.weights + 1
        if facts["error_to_rtn"] is not None:
            self.gains.append(facts["error_to_rtn"])


@dataclass(slots=True)
class _Layer:
    """The calibrated weights of one layer."""

    experts: defaultdict[int, _Expert] = field(default_factory=lambda: defaultdict(_Expert))
    gains: list[float] = field(default_factory=list)
    weight_errors: list[float] = field(default_factory=list)
    alphas: list[float] = field(default_factory=list)
    largest_percdamp: float = 0.0
    rows_from_floor: int = 0

    def add(self, expert: int | None, facts: dict[str, Any], error: float) -> None:
        if expert is not None:
            self.experts[expert].add(facts, error)
        if facts["error_to_rtn"] is not None:
            self.gains.append(facts["error_to_rtn"])
        if (weight_error := facts.get("weight_error_to_rtn")) is not None:  # older artifacts have none
            self.weight_errors.append(weight_error)
        if (alpha := facts.get("fold_alpha")) is not None:
            self.alphas.append(alpha)
        self.largest_percdamp = max(self.largest_percdamp, facts["percdamp"])
        self.rows_from_floor += facts["rows_from_floor"]

    def to_json(self) -> dict[str, Any]:
        """Medians over weights: ``error_to_rtn``, the squared output error relative to rtn's;
        ``weight_error_to_rtn``, that of the weights themselves; ``fold_alpha``, where weights were folded.
        ``routed_tokens`` is there where experts learned from all tokens: what the router sent to each."""
        found = sorted(self.experts.items())
        routed = [expert.routed for _, expert in found if expert.routed is not None]
        return {
            "experts": [number for number, _ in found],
            "tokens": [expert.tokens for _, expert in found],
            **({"routed_tokens": routed} if routed else {}),
            "errors": [round_figure(sqrt(expert.squares / expert.weights)) for _, expert in found],
            "errors_to_rtn": [_median(expert.gains) for _, expert in found],
            "shrunk_experts": [number for number, expert in found if expert.is_shrunk],
            "error_to_rtn": _median(self.gains), "weight_error_to_rtn": _median(self.weight_errors),
            **({"fold_alpha": _median(self.alphas)} if self.alphas else {}),
            "largest_percdamp": self.largest_percdamp, "rows_from_floor": self.rows_from_floor,
        }  # fmt: skip


class Coverage:
    """Gathers the facts of calibrated weights; ``layers`` and ``exceptions`` are parts of report.json."""

    def __init__(self) -> None:
        self._layers: dict[str, _Layer] = {}
        self._dampened: list[dict[str, Any]] = []
        self._rounded: list[str] = []

    def add(self, record: TensorRecord) -> None:
        """One line of ``tensors.jsonl``; what was not calibrated is passed over."""
        facts = record.decode.calibration
        if facts is None:
            return
        key = "none" if record.layer is None else str(record.layer)
        self._layers.setdefault(key, _Layer()).add(record.expert, facts, record.decode.relative_error or 0.0)
        if facts["attempts"] > 1 or facts.get("retry") == "dampening":
            entry = {"tensor": record.name, "percdamp": facts["percdamp"], "attempts": facts["attempts"]}
            self._dampened.append(entry)
        if facts["form"] == "none":
            self._rounded.append(record.name)

    def layers(self) -> dict[str, Any]:
        """By layer, in the source's order; empty where nothing was calibrated."""
        return {key: layer.to_json() for key, layer in self._layers.items()}

    def exceptions(self) -> dict[str, Any]:
        """Weights that took more dampening than the recipe states, largest first; and those only rounded."""
        dampened = sorted(self._dampened, key=lambda entry: (-entry["percdamp"], entry["tensor"]))
        return {"dampened": dampened, "rounded": self._rounded}


def _median(values: list[float]) -> float | None:
    return round_figure(median(values)) if values else None
