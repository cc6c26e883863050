"""The report of a conversion, and two conversions of one source side by side, from their records alone.

No tensor data is read: ``tensors.jsonl`` holds the error of every rounded weight, and of calibrated ones how they
were calibrated. Two artifacts are compared weight by weight in the decode view, and summed up by layer and
projection.

The relative error of the weights is not what a calibrated method makes small: it accepts a larger one for a
smaller error of the output. So the squared output error relative to rtn's stands beside it; for rtn that is 1 by
definition. It is measured on each artifact's own calibration tokens and relative to rtn with its own group size,
so weights are called better or worse by it only where the group sizes are equal.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from math import sqrt
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from ..artifact.canonical import round_figure
from ..errors import ArtifactError, UsageError

if TYPE_CHECKING:
    from ..artifact import Artifact
    from ..artifact.records import Outcome, TensorRecord


@dataclass(frozen=True)
class Side:
    """What one of two compared artifacts is.

    Attributes:
        path: its directory.
        method, group_size: of its recipe; ``overrides`` of them that it has for some modules.
        engine: what quantized.
        calibration: digest of the calibration set, None for data-free methods.
    """

    path: str
    pair_id: str
    method: str
    group_size: int
    engine: str
    calibration: str | None
    overrides: int


@dataclass(frozen=True)
class Group:
    """The weights of one layer and projection, or of a larger part, in both artifacts.

    Errors and counts are of weights rounded in both; those that the other side kept are in ``only_a``, ``only_b``.

    Attributes:
        layer: None for weights outside the layers, and in totals.
        projection: name of the linear; None in totals.
        weights: rounded in both.
        error_a, error_b: root of the mean squared relative error; None without weights.
        ratio: ``error_b / error_a``; None where that has no meaning.
        better, worse: weights whose error is smaller, larger in b.
        output_a, output_b: median of the squared output error relative to rtn's; None unless known of some weight.
        output_better, output_worse: as ``better`` and ``worse``, by this error.
    """

    layer: int | None
    projection: str | None
    weights: int
    error_a: float | None
    error_b: float | None
    ratio: float | None
    better: int
    worse: int
    only_a: int
    only_b: int
    output_a: float | None
    output_b: float | None
    output_better: int
    output_worse: int


@dataclass(frozen=True)
class Comparison:
    """Two conversions of one source; ``groups`` in the source's order, ``projections`` over all layers."""

    source: str
    a: Side
    b: Side
    groups: tuple[Group, ...]
    projections: tuple[Group, ...]
    total: Group

    def to_json(self) -> dict[str, Any]:
        """JSON-ready dict."""
        return asdict(self)


class _Figures(NamedTuple):
    """Of one weight: relative error (None: not rounded), squared output error relative to rtn's, group size."""

    error: float | None
    output: float | None
    group_size: int | None


@dataclass(slots=True)
class _Sums:
    """Running sums of one group."""

    squares: list[float] = field(default_factory=lambda: [0.0, 0.0])
    outputs: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    weights: int = 0
    better: int = 0
    worse: int = 0
    output_better: int = 0
    output_worse: int = 0
    only: list[int] = field(default_factory=lambda: [0, 0])

    def add(self, a: _Figures, b: _Figures) -> None:
        if a.error is None or b.error is None:
            self.only[0] += a.error is not None
            self.only[1] += b.error is not None
            return
        self.weights += 1
        self.better += b.error < a.error
        self.worse += b.error > a.error
        if a.output is not None and b.output is not None and a.group_size == b.group_size:
            self.output_better += b.output < a.output
            self.output_worse += b.output > a.output
        for side, error, output in ((0, a.error, a.output), (1, b.error, b.output)):
            self.squares[side] += error * error
            if output is not None:
                self.outputs[side].append(output)

    def group(self, layer: int | None, projection: str | None) -> Group:
        a, b = (round_figure(sqrt(s / self.weights)) if self.weights else None for s in self.squares)
        output_a, output_b = (round_figure(median(found)) if found else None for found in self.outputs)
        ratio = round_figure(b / a) if a and b is not None else None
        return Group(
            layer, projection, self.weights, a, b, ratio, self.better, self.worse, self.only[0], self.only[1],
            output_a, output_b, self.output_better, self.output_worse,
        )  # fmt: skip


def report_conversion(artifact: Artifact) -> dict[str, Any]:
    """What report.json holds, made anew from the artifact's core.

    Raises:
        ArtifactError: the records are damaged.
    """
    from ..artifact.attachments.report import build_report

    return build_report(artifact.manifest, artifact.records())


def compare_conversions(a: Artifact, b: Artifact) -> Comparison:
    """Compare the decode views of two conversions of one source.

    Raises:
        UsageError: the two were not made from the same tensors.
        ArtifactError: the records of one are damaged.
    """
    from ..artifact.attachments.report import projection

    _check_same_source(a, b)
    sums: dict[tuple[int | None, str], _Sums] = {}
    over_layers: dict[str, _Sums] = {}
    total = _Sums()
    for record, first, second in _pairs(a, b):
        if first.error is None and second.error is None:
            continue
        name = projection(record.name)
        of_layer = sums.setdefault((record.layer, name), _Sums())
        for target in (of_layer, over_layers.setdefault(name, _Sums()), total):
            target.add(first, second)
    return Comparison(
        a.manifest.source.label or a.manifest.source.family, _side(a), _side(b),
        tuple(s.group(*key) for key, s in sums.items()),
        tuple(s.group(None, name) for name, s in over_layers.items()), total.group(None, None),
    )  # fmt: skip


def _figures(outcome: Outcome) -> _Figures:
    if outcome.calibration is not None:
        return _Figures(outcome.relative_error, outcome.calibration["error_to_rtn"], outcome.group_size)
    return _Figures(outcome.relative_error, 1.0 if outcome.method == "rtn" else None, outcome.group_size)


def _check_same_source(a: Artifact, b: Artifact) -> None:
    first, second = a.manifest.source, b.manifest.source
    if first.tensor_root == second.tensor_root:
        return
    names = [f"{s.label or s.family} (tensors {s.tensor_root[:16]})" for s in (first, second)]
    raise UsageError(
        f"made from other tensors than {os.fspath(a.path)}: {names[1]}, not {names[0]}", where=os.fspath(b.path),
        accepted="two conversions of the same source tensors",
        hint="quantkit diff compares any two checkpoints, quantkit report one artifact.",
    )  # fmt: skip


def _pairs(a: Artifact, b: Artifact) -> Iterator[tuple[TensorRecord, _Figures, _Figures]]:
    """Records of a with the figures of both, by name: the same tensors may lie in other files in another order."""
    others = {record.name: _figures(record.decode) for record in b.records()}
    for record in a.records():
        if record.name not in others:
            raise ArtifactError(
                f"no record of {record.name!r}, which its source has", where=os.fspath(b.path),
                hint="Run quantkit verify on it.",
            )  # fmt: skip
        yield record, _figures(record.decode), others[record.name]


def _side(artifact: Artifact) -> Side:
    manifest = artifact.manifest
    decode = manifest.recipe["decode"]
    return Side(
        os.fspath(artifact.path), manifest.pair_id, decode["method"], decode["group_size"],
        manifest.engine, manifest.calibration_sha256, len(manifest.recipe.get("overrides", ())),
    )  # fmt: skip
