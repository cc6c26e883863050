"""Figures about a conversion, from the records alone: error by layer, projection and expert; tokens seen; sizes.

Errors of several weights are combined as the root of the mean square of their relative errors: within one model
the weights of a layer and projection have the same shape, so this is close to the error of all of them as one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import sqrt
from statistics import median
from typing import TYPE_CHECKING, Any

from ..canonical import round_figure
from ..layout import VIEWS

if TYPE_CHECKING:
    from ..manifest import Manifest
    from ..records import TensorRecord

WORST = 20


@dataclass(slots=True)
class _Errors:
    """Running summary of relative errors."""

    count: int = 0
    squares: float = 0.0
    largest: float = 0.0

    def add(self, error: float) -> None:
        self.count += 1
        self.squares += error * error
        self.largest = max(self.largest, error)

    def to_json(self) -> dict[str, Any]:
        mean = sqrt(self.squares / self.count) if self.count else 0.0
        return {"weights": self.count, "rms": round_figure(mean), "max": round_figure(self.largest)}


@dataclass(slots=True)
class _Coverage:
    """What the calibrated experts of one layer saw, and what that gave."""

    tokens: dict[int, int] = field(default_factory=dict)  # by expert
    shrunk: set[int] = field(default_factory=set)
    gains: list[float] = field(default_factory=list)
    largest_percdamp: float = 0.0

    def add(self, expert: int | None, facts: dict[str, Any]) -> None:
        if expert is not None:
            self.tokens[expert] = facts["tokens"]
            if facts["shrunk"]:
                self.shrunk.add(expert)
        if facts["error_to_rtn"] is not None:
            self.gains.append(facts["error_to_rtn"])
        self.largest_percdamp = max(self.largest_percdamp, facts["percdamp"])

    def to_json(self) -> dict[str, Any]:
        """``error_to_rtn`` is the median over weights of the squared output error relative to rtn's."""
        return {
            "tokens": [count for _, count in sorted(self.tokens.items())], "shrunk_experts": sorted(self.shrunk),
            "error_to_rtn": round_figure(median(self.gains)) if self.gains else None,
            "largest_percdamp": self.largest_percdamp,
        }  # fmt: skip


def build_report(manifest: Manifest, records: Iterable[TensorRecord]) -> dict[str, Any]:
    """Content of report.json."""
    views: dict[str, dict[str, Any]] = {}
    worst: dict[str, list[tuple[float, str]]] = {view: [] for view in VIEWS}
    sums: dict[str, dict[str, dict[str, _Errors]]] = {
        view: {key: defaultdict(_Errors) for key in ("total", "layer", "projection", "role")} for view in VIEWS
    }
    calibration: dict[str, _Coverage] = {}
    for record in records:
        if (facts := record.decode.calibration) is not None:
            calibration.setdefault(str(record.layer), _Coverage()).add(record.expert, facts)
        for view in VIEWS:
            error = record.outcome(view).relative_error
            if error is None:
                continue
            keys = {
                "total": "all", "layer": "none" if record.layer is None else str(record.layer),
                "projection": _projection(record.name), "role": record.role,
            }  # fmt: skip
            for kind, key in keys.items():
                sums[view][kind][key].add(error)
            worst[view].append((error, record.name))
    for view in VIEWS:
        if not worst[view]:
            continue
        views[view] = {
            f"by_{kind}": {key: value.to_json() for key, value in sorted(table.items(), key=_numbers_first)}
            for kind, table in sums[view].items() if kind != "total"
        }  # fmt: skip
        views[view]["all"] = sums[view]["total"]["all"].to_json()
        top = sorted(worst[view], key=lambda item: (-item[0], item[1]))[:WORST]
        views[view]["worst"] = [{"tensor": name, "relative_error": error} for error, name in top]
    return {
        "pair_id": manifest.pair_id, "source": manifest.source.label, "family": manifest.source.family,
        "recipe": manifest.recipe, "counts": manifest.counts,
        "sizes": {name: view.nbytes for name, view in manifest.views.items()}, "errors": views,
        **({"calibration": {layer: c.to_json() for layer, c in calibration.items()}} if calibration else {}),
    }  # fmt: skip


def _projection(name: str) -> str:
    """Name of the linear: the component before the parameter suffix."""
    parts = name.rsplit(".", 2)
    return parts[-2] if len(parts) > 1 else name


def _numbers_first(item: tuple[str, _Errors]) -> tuple[int, int, str]:
    key = item[0]
    return (0, int(key), "") if key.isdecimal() else (1, 0, key)
