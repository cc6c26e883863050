"""McNemar's tests of flips: of the items that changed, is one direction more frequent?

Exact (binomial) never rejects too often, and with few flips far too rarely; mid-p counts half of the probability
of what was seen, and comes close to its level without exceeding it in practice (Fagerland, Lydersen and Laake
2013, BMC Medical Research Methodology 13:91). Both take items as independent: of items that share documents they
reject too often, and the clustered test (``clusters.p_value``) is the one to believe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..comparison import Flips
from ..extras import require

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Counts = NDArray[np.int64]


def p_values(lost: Counts, gained: Counts) -> tuple[Floats, Floats]:
    """Two-sided p values, exact and mid-p, of arrays of counts of any one shape."""
    import numpy as np

    binom = require("scipy.stats").binom
    changed, fewer = lost + gained, np.minimum(lost, gained)
    twice = 2 * binom.cdf(fewer, changed, 0.5)
    return np.minimum(twice, 1.0), np.minimum(twice - binom.pmf(fewer, changed, 0.5), 1.0)


def flips(lost: int, gained: int) -> Flips:
    import numpy as np

    exact, mid = p_values(np.array([lost]), np.array([gained]))
    return Flips(lost, gained, float(exact[0]), float(mid[0]))


def power(items: int, p_lost: float, p_gained: float, *, level: float = 0.05, is_mid: bool = True) -> float:
    """Probability that the test rejects "no difference", over all tables of ``items`` independent pairs.

    Computed, not approximated: how many items change is binomial, and given that number, so is how many of them
    are lost.

    Args:
        items: pairs.
        p_lost, p_gained: probabilities of an item to flip in each direction.
        level: of the two-sided test.
        is_mid: mid-p, else exact.
    """
    import numpy as np

    binom = require("scipy.stats").binom
    p_changed = p_lost + p_gained
    if p_changed == 0:
        return 0.0
    first, last = binom.ppf([1e-12, 1 - 1e-12], items, p_changed).astype(int)
    changed = np.arange(max(first, 0), last + 1)
    lost = np.arange(last + 1)
    grid, known = np.meshgrid(changed, lost, indexing="ij")
    is_table = known <= grid
    p = p_values(np.where(is_table, known, 0), np.where(is_table, grid - known, 0))[is_mid]
    chance = binom.pmf(known, grid, p_lost / p_changed)
    rejected = (np.where((p <= level) & is_table, chance, 0.0)).sum(axis=1)
    return float(binom.pmf(changed, items, p_changed) @ rejected)
