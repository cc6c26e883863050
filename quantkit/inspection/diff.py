"""What differs between two checkpoints or views.

Compared are logical weights first: a module stored as FP8 block on one side and INT4 on the other is one changed
weight with a relative error, not five added and removed tensors, and a scale that was only renamed
(``weight_scale_inv``, ``weight_scale``) is no change. Everything that is not part of a two-dimensional weight on
both sides is compared by name. A scale that AWQ moved from one weight of an expert to another is undone first: it
is no error of either. Equal bytes are found without dequantizing; the numbers are read in row tiles.

Legend: O output rows, I input columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from .tiles import TILE_VALUES, tensor_tiles, weight_tiles

if TYPE_CHECKING:
    from ..artifact.folds import Folds
    from ..checkpoint import Checkpoint
    from ..checkpoint.tensor import StoredWeight, TensorInfo
    from .tiles import Floats

OnProgress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Change:
    """One tensor, or one logical weight, that is not the same on both sides.

    Attributes:
        name: tensor or module.
        status: ``added`` (only in b), ``removed`` (only in a) or ``changed``.
        before, after: storage or dtype and shape, such as ``fp8-block [512, 256]``; None where absent.
        relative_error: ``||a - b|| / ||a||`` (Frobenius); None when the data were not read, of another shape, or
            when the error is infinite (a is all zeros, or NaN on one side).
        max_error: largest ``|a - b|``.
    """

    name: str
    status: str
    before: str | None
    after: str | None
    relative_error: float | None = None
    max_error: float | None = None


@dataclass(frozen=True)
class Difference:
    """All changes from a to b.

    ``identical`` counts the tensors and weights that are the same byte for byte, ``unread`` those of the same
    name, dtype and shape whose data were not compared (``quick``).
    """

    a: str
    b: str
    identical: int
    unread: int
    changes: tuple[Change, ...]

    def count(self, status: str) -> int:
        """How many changes have this status."""
        return sum(c.status == status for c in self.changes)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready dict."""
        counts = {s: self.count(s) for s in ("added", "removed", "changed")}
        head = {"a": self.a, "b": self.b, "same": not self.changes, "identical": self.identical}
        return {**head, "unread": self.unread, **counts, "changes": [asdict(c) for c in self.changes]}


def compare(
    a: Checkpoint, b: Checkpoint, *, quick: bool = False, on_progress: OnProgress | None = None,
    folds: tuple[Folds | None, Folds | None] = (None, None),
) -> Difference:  # fmt: skip
    """Compare two open checkpoints.

    Args:
        quick: names, dtypes and shapes only; no tensor data is read.
        on_progress: called with (bytes done, bytes in all, name); bytes are those of ``a``.
        folds: of a and of b, where they are decode views that have some.

    Raises:
        SourceError: one of the two is damaged.
    """
    weights_b = b.weights()
    pairs = [(w, weights_b[m]) for m, w in a.weights().items() if m in weights_b]
    in_pairs_a = {p.name for w, _ in pairs for p in w.parts}
    in_pairs_b = {p.name for _, w in pairs for p in w.parts}
    alone_b = {n: t for n, t in b.tensors.items() if n not in in_pairs_b}
    work: list[_Pair] = [_weight_pair(a, b, *pair, folds) for pair in pairs]
    work += [_tensor_pair(a, b, t, alone_b.get(n)) for n, t in a.tensors.items() if n not in in_pairs_a]
    total, done, identical, unread = sum(p.nbytes for p in work), 0, 0, 0
    changes = []
    for pair in work:
        change = pair.change(quick=quick)
        if change:
            changes.append(change)
        elif quick:
            unread += 1
        else:
            identical += 1
        done += pair.nbytes
        if on_progress:
            on_progress(done, total, pair.name)
    changes += [Change(n, "added", None, _form(t)) for n, t in alone_b.items() if n not in a.tensors]
    return Difference(a.label, b.label, identical, unread, tuple(changes))


@dataclass(frozen=True)
class _Pair:
    """One thing to compare: how it looks on both sides, and how to compare its data."""

    name: str
    nbytes: int
    before: str
    after: str | None
    is_same_form: bool
    is_same_data: Callable[[], bool]
    errors: Callable[[], tuple[float | None, float | None]]

    def change(self, *, quick: bool) -> Change | None:
        if self.after is None:
            return Change(self.name, "removed", self.before, None)
        if self.is_same_form and (quick or self.is_same_data()):
            return None
        errors = (None, None) if quick else self.errors()
        return Change(self.name, "changed", self.before, self.after, *errors)


def _weight_pair(
    a: Checkpoint, b: Checkpoint, wa: StoredWeight, wb: StoredWeight, folds: tuple[Folds | None, Folds | None]
) -> _Pair:
    scales = {f.by_module[wa.module].sha256 if f and wa.module in f.by_module else None for f in folds}

    def errors() -> tuple[float | None, float | None]:
        if wa.shape != wb.shape:
            return None, None
        return _errors(weight_tiles(a, wa, folds[0]), weight_tiles(b, wb, folds[1]))

    before, after = (f"{w.weight.dtype if w.scale is None else w.storage.value} {list(w.shape)}" for w in (wa, wb))
    same = (wa.storage, wa.block, wa.shape) == (wb.storage, wb.block, wb.shape)
    same = same and len(scales) == 1 and [p.dtype for p in wa.parts] == [p.dtype for p in wb.parts]
    return _Pair(
        wa.module, sum(p.nbytes for p in wa.parts), before, after, same,
        lambda: all(_same_bytes(a, b, p, q) for p, q in zip(wa.parts, wb.parts, strict=True)),
        errors,
    )  # fmt: skip


def _tensor_pair(a: Checkpoint, b: Checkpoint, ta: TensorInfo, tb: TensorInfo | None) -> _Pair:
    if tb is None:
        return _Pair(ta.name, ta.nbytes, _form(ta), None, False, lambda: False, lambda: (None, None))
    return _Pair(
        ta.name, ta.nbytes, _form(ta), _form(tb), _form(ta) == _form(tb),
        lambda: _same_bytes(a, b, ta, tb),
        lambda: _errors(tensor_tiles(a, ta), tensor_tiles(b, tb)) if ta.shape == tb.shape else (None, None),
    )  # fmt: skip


def _form(info: TensorInfo) -> str:
    return f"{info.dtype} {list(info.shape)}"


def _same_bytes(a: Checkpoint, b: Checkpoint, ta: TensorInfo, tb: TensorInfo) -> bool:
    if ta.nbytes != tb.nbytes:
        return False
    step = 4 * TILE_VALUES
    ranges = ((i, min(i + step, ta.nbytes)) for i in range(0, ta.nbytes, step))
    return all(memoryview(a.read_range(ta, i, j)) == memoryview(b.read_range(tb, i, j)) for i, j in ranges)


def _errors(a: Iterator[Floats], b: Iterator[Floats]) -> tuple[float | None, float | None]:
    """Relative Frobenius error and largest difference of two runs of flat tiles with the same values in all.

    NaN on one side only counts as an infinite error, reported as None with a largest difference of None.
    """
    import numpy as np

    squared = energy = largest = 0.0
    for va, vb in _aligned(a, b):
        x, y = va.astype(np.float64), vb.astype(np.float64)
        both_nan = np.isnan(x) & np.isnan(y)
        delta = np.where(both_nan | (x == y), 0.0, x - y)
        squared += float(np.square(delta).sum())
        energy += float(np.square(np.where(np.isnan(x), 0.0, x)).sum())
        largest = max(largest, float(np.abs(delta).max(initial=0.0))) if not math.isnan(largest) else largest
        largest = math.nan if np.isnan(delta).any() else largest
    relative = math.sqrt(squared / energy) if energy else (0.0 if squared == 0 else math.inf)
    return _finite(relative), _finite(largest)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _aligned(a: Iterator[Floats], b: Iterator[Floats]) -> Iterator[tuple[Floats, Floats]]:
    """Cut two runs of flat tiles at common places; holds one tile of each."""
    left, right = next(a, None), next(b, None)
    while left is not None and right is not None:
        n = min(left.size, right.size)
        yield left[:n], right[:n]
        left = left[n:] if n < left.size else next(a, None)
        right = right[n:] if n < right.size else next(b, None)
