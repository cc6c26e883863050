"""Figures about a conversion, from the records alone: error by layer, projection and expert; tokens seen; sizes.

Errors of several weights are combined as the root of the mean square of their relative errors: within one model
the weights of a layer and projection have the same shape, so this is close to the error of all of them as one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Any

from ..canonical import round_figure
from ..layout import VIEWS
from .coverage import Coverage
from .retries import Retries

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


def build_report(manifest: Manifest, records: Iterable[TensorRecord]) -> dict[str, Any]:
    """Content of report.json."""
    views: dict[str, dict[str, Any]] = {}
    worst: dict[str, list[tuple[float, str]]] = {view: [] for view in VIEWS}
    sums: dict[str, dict[str, dict[str, _Errors]]] = {
        view: {key: defaultdict(_Errors) for key in ("total", "layer", "projection", "role")} for view in VIEWS
    }
    coverage, retries = Coverage(), Retries(manifest.recipe)
    for record in records:
        coverage.add(record)
        retries.add(record)
        for view in VIEWS:
            error = record.outcome(view).relative_error
            if error is None:
                continue
            keys = {
                "total": "all", "layer": "none" if record.layer is None else str(record.layer),
                "projection": projection(record.name), "role": record.role,
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
        "recipe": manifest.recipe, "engine": manifest.engine, "counts": manifest.counts,
        "sizes": {name: view.nbytes for name, view in manifest.views.items()}, "errors": views,
        **({"amendments": [a.to_json() for a in manifest.plan_amendments]} if manifest.plan_amendments else {}),
        **_calibration(manifest, coverage, retries),
    }  # fmt: skip


def _calibration(manifest: Manifest, coverage: Coverage, retries: Retries) -> dict[str, Any]:
    """How weights were calibrated, and those that were not treated as asked."""
    layers = coverage.layers()
    settings = manifest.recipe.get("calibration") or {}
    # Every other engine lets its experts learn from all tokens, whatever is asked.
    is_route_all = bool(layers) and (bool(settings.get("route_all")) or manifest.engine != "quantkit")
    return {
        **({"route_all": True} if is_route_all else {}), **({"calibration": layers} if layers else {}),
        **({"exceptions": coverage.exceptions() | retries.to_json()} if layers or retries.are_asked else {}),
    }  # fmt: skip


def projection(name: str) -> str:
    """Name of the linear: the component before the parameter suffix."""
    parts = name.rsplit(".", 2)
    return parts[-2] if len(parts) > 1 else name


def _numbers_first(item: tuple[str, _Errors]) -> tuple[int, int, str]:
    key = item[0]
    return (0, int(key), "") if key.isdecimal() else (1, 0, key)
