"""Two runs side by side: scores, differences with intervals, tests and verdicts of every metric they share.

The p value that counts, and that Holm's adjustment gets: for accuracies of independent items McNemar's mid-p; for
everything else, accuracies of clustered items included, the t test of the clustered difference, and of accuracies
and shares of which few clusters changed the larger one of that and a sign test of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quantkit.errors import UsageError

from .comparing import Comparing
from .comparison import Comparison
from .matching import match
from .paired.bootstrap import RESAMPLES
from .paired.holm import holm
from .run import Run


def compare(
    baseline: Run,
    candidate: Run,
    *,
    margin: float = 0.008,
    confidence: float = 0.95,
    seed: int = 0,
    resamples: int = RESAMPLES,
    allow_left_out: bool = False,
    margins: Mapping[str, float] | None = None,
) -> Comparison:
    """Compare all that two runs share.

    Args:
        margin: of non-inferiority of accuracies and shares, a fraction (0.008 for 0.8 points).
        margins: of some, by ``task.metric``, in its place (what a gate says: ``gate.margins_of``).
        confidence: of two-sided intervals.
        seed: of the bootstrap, the same for every metric.
        resamples: of the bootstrap, at least 2,000.
        allow_left_out: compare what both have although one of them has more; said in ``left_out``.

    Raises:
        UsageError: the runs can't be compared, with the reason.
    """
    if not (0 < margin < 1 and 0.5 <= confidence <= 0.999 and resamples >= 2000):
        raise UsageError(
            f"margin {margin}, confidence {confidence}, {resamples} resamples",
            accepted="margin in (0, 1), confidence in [0.5, 0.999], at least 2,000 resamples",
        )
    found = match(baseline, candidate)
    if found.left_out and not allow_left_out:
        more = f" (and {len(found.left_out) - 1} more)" if len(found.left_out) > 1 else ""
        raise UsageError(
            f"the runs did not score the same: {found.left_out[0]}{more}",
            where=f"{baseline.label}, {candidate.label}",
            hint="What both have can be compared with --allow-left-out.",
        )
    own = margins or {}
    metrics = [
        Comparing(
            task, metric, own.get(f"{task.task.name}.{metric.name}", margin), confidence, seed, resamples
        ).result()
        for task in found.tasks
        for metric in task.metrics
    ]
    adjusted = holm([metric.p_value for metric in metrics])
    return Comparison(
        baseline,
        candidate,
        confidence,
        tuple(replace(metric, p_adjusted=p) for metric, p in zip(metrics, adjusted, strict=True)),
        found.left_out + found.notes,
    )
