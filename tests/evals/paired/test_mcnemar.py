"""McNemar's tests against statsmodels, a textbook table, plain sums, and power against simulation."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from statsmodels.stats.contingency_tables import mcnemar

from quantkit_evals.paired.mcnemar import flips, p_values, power


@given(st.integers(0, 60), st.integers(0, 60))
def test_exact_is_that_of_statsmodels_and_mid_is_a_plain_sum(lost: int, gained: int) -> None:
    found = flips(lost, gained)
    assert found.p_exact == pytest.approx(mcnemar([[9, lost], [gained, 9]], exact=True).pvalue, abs=1e-12)
    n, fewer = lost + gained, min(lost, gained)
    mid = 2 * (sum(comb(n, k) for k in range(fewer)) + comb(n, fewer) / 2) / 2**n
    assert found.p_mid == pytest.approx(min(mid, 1), abs=1e-12)
    assert found.p_mid <= found.p_exact


def test_published_tables() -> None:
    """Agresti's prime minister ratings (150 and 86), and 1 against 7 of Fagerland et al. 2013 (0.0703, 0.0391)."""
    assert flips(150, 86).p_exact == pytest.approx(3.7e-5, rel=0.05)
    found = flips(1, 7)
    assert found.p_exact == pytest.approx(0.0703, abs=5e-5)
    assert found.p_mid == pytest.approx(0.0391, abs=5e-5)
    assert flips(0, 0).p_mid == flips(0, 0).p_exact == flips(4, 4).p_mid == 1


@pytest.mark.parametrize(("items", "lost", "gained"), [(60, 0.2, 0.05), (400, 0.05, 0.02)])
@pytest.mark.parametrize("is_mid", [False, True])
def test_power_is_what_simulation_finds(items: int, lost: float, gained: float, is_mid: bool) -> None:
    drawn = np.random.default_rng(0).multinomial(items, [lost, gained, 1 - lost - gained], size=40_000)
    seen = (p_values(drawn[:, 0], drawn[:, 1])[is_mid] <= 0.05).mean()
    assert power(items, lost, gained, is_mid=is_mid) == pytest.approx(seen, abs=0.01)


def test_power_of_nothing_and_of_everything() -> None:
    assert power(500, 0.0, 0.0) == 0
    assert power(500, 0.5, 0.0) == pytest.approx(1)
    assert power(500, 0.03, 0.03, is_mid=False) < 0.05 < power(500, 0.05, 0.02, is_mid=False)
