"""Several metrics at once: Holm's step-down adjustment of p values, valid under any dependence between them."""

from __future__ import annotations

from collections.abc import Sequence

from ..extras import require


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Adjusted p values in the same order; None stays None and does not count."""
    known = [p for p in p_values if p is not None]
    if not known:
        return list(p_values)
    adjusted = iter(require("statsmodels.stats.multitest").multipletests(known, method="holm")[1])
    return [None if p is None else float(next(adjusted)) for p in p_values]
