"""Statistics and a histogram of one tensor's numbers, streamed.

Two passes over the tiles: range and moments first, then the histogram over exactly that range. A one-pass
histogram would need a guessed range. Sums are kept in float64 and combined tile by tile (Chan's update), so a
large mean doesn't swallow the variance.

Source: Chan, Golub, LeVeque 1979, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from .tiles import tensor_tiles, weight_tiles

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..checkpoint.tensor import StoredWeight, TensorInfo
    from .tiles import Floats

BINS = 40


@dataclass(frozen=True)
class TensorStatistics:
    """What one tensor holds. Moments, range and histogram are over the finite values.

    Attributes:
        name: tensor, or the weight's module when its codes were dequantized.
        dtype, shape, nbytes: of the logical tensor as stored (scale included in ``nbytes``).
        storage: ``fp8-block``, ``int4-group``, ... when dequantized, else ``plain``.
        minimum, maximum, mean, std, rms: None when there is no finite value.
        histogram: counts in equal bins from ``minimum`` to ``maximum``.
        parts: the tensors it is stored in, with file names.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    storage: str
    count: int
    zeros: int
    nan: int
    inf: int
    minimum: float | None
    maximum: float | None
    mean: float | None
    std: float | None
    rms: float | None
    histogram: tuple[int, ...]
    parts: tuple[tuple[str, str], ...]

    def to_json(self) -> dict[str, Any]:
        """JSON-ready dict."""
        return asdict(self)


@dataclass
class _Moments:
    count: int = 0
    finite: int = 0
    zeros: int = 0
    nan: int = 0
    mean: float = 0.0
    m2: float = 0.0  # sum of squared deviations from the mean
    low: float = math.inf
    high: float = -math.inf

    def add(self, values: Floats) -> None:
        import numpy as np

        flat = values.reshape(-1)
        self.count += flat.size
        self.nan += int(np.isnan(flat).sum())
        good = flat[np.isfinite(flat)].astype(np.float64)
        if not good.size:
            return
        self.zeros += int((good == 0).sum())
        mean, total = float(good.mean()), self.finite + good.size
        delta = mean - self.mean
        self.m2 += float(((good - mean) ** 2).sum()) + delta * delta * self.finite * good.size / total
        self.mean += delta * good.size / total
        self.finite = total
        self.low, self.high = min(self.low, float(good.min())), max(self.high, float(good.max()))


def tensor_statistics(checkpoint: Checkpoint, name: str) -> TensorStatistics:
    """Statistics of a tensor or of a module's weight.

    Args:
        name: a tensor name, a module name or MODULE.weight; the codes of a quantized weight are dequantized,
            its scale tensor is shown as stored.

    Raises:
        UsageError: no tensor of that name; names the nearest ones.
        SourceError: its bytes or scales are damaged.
    """
    weight, info = _find(checkpoint, name)
    moments = _Moments()

    def tiles() -> Iterator[Floats]:
        return weight_tiles(checkpoint, weight) if weight else tensor_tiles(checkpoint, info)

    for values in tiles():
        moments.add(values)
    parts = weight.parts if weight else (info,)
    known = moments.finite > 0
    return TensorStatistics(
        name=weight.module if weight else info.name,
        dtype=info.dtype,
        shape=weight.shape if weight else info.shape,
        nbytes=sum(p.nbytes for p in parts),
        storage=weight.storage.value if weight else "plain",
        count=moments.count,
        zeros=moments.zeros,
        nan=moments.nan,
        inf=moments.count - moments.finite - moments.nan,
        minimum=moments.low if known else None,
        maximum=moments.high if known else None,
        mean=moments.mean if known else None,
        std=math.sqrt(moments.m2 / moments.finite) if known else None,
        rms=math.sqrt(moments.m2 / moments.finite + moments.mean**2) if known else None,
        histogram=_histogram(tiles, moments.low, moments.high) if known else (),
        parts=tuple((p.name, p.file) for p in parts),
    )


def _find(checkpoint: Checkpoint, name: str) -> tuple[StoredWeight | None, TensorInfo]:
    weights = checkpoint.weights()
    info = checkpoint.tensors.get(name)
    # The name that the weight had in the source, and has in reports, is also good for its packed form.
    module = name if name in weights or info is not None else name.removesuffix(".weight")
    if module in weights:
        return weights[module], weights[module].weight
    if info is None:
        from difflib import get_close_matches

        near = get_close_matches(name, [*checkpoint.tensors, *weights], n=3)
        hint = (
            f"Did you mean {' or '.join(near)}?" if near else "Run inspect without --tensor to see what there is."
        )
        raise UsageError(f"no tensor {name!r}", where=checkpoint.label, hint=hint)
    weight = weights.get(name.rpartition(".")[0])
    return (weight if weight is not None and weight.weight == info else None), info


def _histogram(tiles: Callable[[], Iterator[Floats]], low: float, high: float) -> tuple[int, ...]:
    import numpy as np

    counts = np.zeros(BINS if high > low else 1, np.int64)
    for values in tiles():
        flat = values.reshape(-1)
        flat = flat[np.isfinite(flat)]
        counts += np.histogram(flat, len(counts), (low, high))[0] if high > low else flat.size
    return tuple(int(c) for c in counts)
