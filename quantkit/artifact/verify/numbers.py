"""Verification of numbers: scales, and the recorded error figures on a sample; and what engines will say."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ...errors import QuantkitError, SourceError
from ..artifact import Artifact
from ..dequantize import RowReader, row_nbytes, row_tiles
from ..folds import folded
from ..layout import VIEWS
from ..records import TensorRecord
from ..view import View
from .findings import Findings, Section
from .opened import check_each, is_closed
from .records import Accounts

if TYPE_CHECKING:
    from ...checkpoint.tensor import StoredWeight

SAMPLE = 24
_Fold = Callable[..., Any]  # rows of a weight and the first of them -> the rows after the fold
_TILE_BYTES = 2 << 20
_FP8_STEP = 1 / 16  # largest rounding error of E4M3, relative; behind a fold its mean may be another
_CLOSE = 1e-4  # relative; figures are rounded to six digits and summed in another order


def check_scales(view: View, findings: Findings) -> None:
    """Every scale of a view is one that can be right (and its shape fits, which opening the weights checks)."""
    if is_closed(f"scales of {view.name}", findings, view):
        return
    with findings.section(f"scales of {view.name}") as section:
        count = 0
        for weight in view.tensors.weights().values():
            if weight.scale is None:
                continue
            count += 1
            try:
                view.tensors.scales_float32(weight)
            except QuantkitError as problem:
                section.problem(problem.what, problem.where)
        section.summary = f"{count:,} scales are finite and of the right sign"


def check_errors(artifact: Artifact, findings: Findings, accounts: Accounts) -> None:
    """Dequantize a sample of rounded weights and compare their error with the recorded figure.

    The reference is the publisher's view. Where neither view is the publisher's (a BF16 source), the two views may
    differ from each other by no more than their recorded errors together.
    """
    rounded = [
        record for record in accounts.records.values()
        if any(record.outcome(view).relative_error is not None for view in VIEWS)
    ]  # fmt: skip
    if not rounded:
        findings.skip("error", "no tensor was rounded")
        return
    if artifact.prefill.is_reference or artifact.decode.is_reference:
        findings.skip("error", "one view is a reference")
        return
    sample = random.Random(artifact.manifest.pair_id).sample(rounded, min(SAMPLE, len(rounded)))
    folds = () if artifact.folds is None or not any(r.decode.fold for r in sample) else (artifact.folds,)
    if is_closed("error", findings, artifact.prefill, artifact.decode, *folds):
        return
    with findings.section("error") as section:
        section.summary = f"{len(sample)} of {len(rounded):,} rounded weights have their recorded error"
        check_each(sample, lambda record: _check_error(artifact, record, section), section)


def check_transforms(artifact: Artifact, findings: Findings, accounts: Accounts) -> None:
    """Derive a sample of the decode view's BF16 tensors from the prefill view again: the same bits."""
    derived = [
        record for record in accounts.records.values()
        if record.decode.action == "transform" and record.decode.relative_error is None
        and len(record.decode.outputs) == 1 and record.name.endswith(".weight")
    ]  # fmt: skip
    if not derived or artifact.prefill.is_reference:
        return
    if is_closed("transforms", findings, artifact.prefill, artifact.decode):
        return
    with findings.section("transforms") as section:
        sample = random.Random(artifact.manifest.pair_id).sample(derived, min(SAMPLE, len(derived)))
        section.summary = f"{len(sample)} of {len(derived):,} derived tensors are what deriving them gives"
        check_each(sample, lambda r: _check_transform(artifact, r.name.rpartition(".")[0], section), section)


def _check_transform(artifact: Artifact, module: str, section: Section) -> None:
    import quantkit_kernels as kernels

    source = RowReader(artifact.prefill.tensors, artifact.prefill[module].stored)
    result = RowReader(artifact.decode.tensors, artifact.decode[module].stored)
    for start, stop in row_tiles(source.weight.shape[0], row_nbytes(source.weight), 1, _TILE_BYTES):
        bits = kernels.float32_to_bf16(source.float32(start, stop))
        if bits.tobytes() != result.codes(start, stop).tobytes():
            section.problem(f"rows {start} to {stop} are not the prefill view's numbers in BF16", module)
            return


def _check_error(artifact: Artifact, record: TensorRecord, section: Section) -> None:
    module = record.name.rpartition(".")[0]
    prefill, decode = artifact.prefill[module], artifact.decode[module]
    recorded = {view: record.outcome(view).relative_error or 0.0 for view in VIEWS}
    publisher = {name: entry.origin == "publisher" for name, entry in artifact.manifest.views.items()}
    fold = _fold_of(artifact, record)
    if publisher["prefill"]:
        seen = _relative_error(artifact, decode.stored, prefill.stored, fold, reference=artifact.prefill)
    else:
        seen = _relative_error(artifact, prefill.stored, decode.stored, fold, reference=artifact.decode)
    if any(publisher.values()):
        wanted = max(recorded.values())
        if abs(seen - wanted) > _CLOSE * max(wanted, 1e-9):
            section.problem(f"relative error is {seen:.6g}, recorded {wanted:.6g}", module)
    elif seen > (sum(recorded.values()) if fold is None else recorded["decode"] + _FP8_STEP) * 1.01:
        section.problem(f"the views differ by {seen:.6g}, more than both recorded errors allow", module)


def _fold_of(artifact: Artifact, record: TensorRecord) -> _Fold | None:
    """What makes the prefill view's numbers comparable with the decode view's."""
    if record.decode.fold is None or artifact.folds is None:
        return None
    scale = artifact.folds.scale(record.decode.fold)
    return partial(folded, scale=scale, fold=record.decode.fold)


def _relative_error(
    artifact: Artifact, weight: StoredWeight, original: StoredWeight, fold: _Fold | None, *, reference: View
) -> float:
    """Of a weight relative to the reference; the prefill view's numbers are folded as the decode view's were."""
    import numpy as np

    other = artifact.decode if reference is artifact.prefill else artifact.prefill
    ours, theirs = RowReader(other.tensors, weight), RowReader(reference.tensors, original)
    error = energy = 0.0
    for start, stop in row_tiles(weight.shape[0], row_nbytes(weight), 1, _TILE_BYTES):
        exact: Any = theirs.float32(start, stop)
        seen: Any = ours.float32(start, stop)
        if fold is not None and reference is artifact.prefill:
            exact = fold(exact, start=start)
        elif fold is not None:
            seen = fold(seen, start=start)
        exact = exact.astype(np.float64)
        error += float(np.square(seen - exact).sum())
        energy += float(np.square(exact).sum())
    return (error / energy) ** 0.5 if energy > 0 else 0.0


def check_engines(artifact: Artifact, findings: Findings) -> None:
    """Which engines and tensor-parallel sizes can load each view; a problem only when none can."""
    from ...models.config import text_shape
    from ...models.engine_rules import Level
    from ...models.engines import check_all, verdict

    for view in (artifact.prefill, artifact.decode):
        if view.is_reference:
            findings.skip(f"engines of {view.name}", "the view is a reference")
            continue
        if is_closed(f"engines of {view.name}", findings, view):
            continue
        with findings.section(f"engines of {view.name}") as section:
            config = view.tensors.config
            if not config:
                section.summary = "not judged: no config.json"
                continue
            try:
                text_shape(config)
            except SourceError as missing:
                section.summary = f"not judged: {missing.what} in config.json"
                continue
            judged = check_all(config, config.get("quantization_config"), modules=view.tensors.weights())
            fits = {
                engine: [tp for tp, found in sizes.items() if verdict(found) is not Level.NO]
                for engine, sizes in judged.items()
            }
            section.summary = "; ".join(
                f"{engine}: tp {', '.join(map(str, sizes))}" if sizes else f"{engine}: no"
                for engine, sizes in fits.items()
            )
            if not any(fits.values()):
                reasons = {f.message for sizes in judged.values() for f in sizes[1] if f.level is Level.NO}
                section.problem(f"no engine can load it: {'; '.join(sorted(reasons))}", view.name)
