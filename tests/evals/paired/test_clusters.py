"""Standard errors and tests against scipy, statsmodels and sums that can be checked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import statsmodels.api as sm

from quantkit_evals.comparison import Score
from quantkit_evals.paired.clusters import cluster_sums, design_effect, p_value, ratio, sign_p_value


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def test_sums_are_those_of_a_loop_in_the_order_of_names(rng) -> None:
    clusters = [f"c{n}" for n in rng.integers(0, 12, 80)]
    columns = rng.normal(size=(80, 3))
    expected = [
        [math.fsum(columns[i, k] for i in range(80) if clusters[i] == name) for k in range(3)]
        for name in sorted(set(clusters))
    ]
    np.testing.assert_allclose(cluster_sums(clusters, columns), expected, atol=1e-12)


def test_by_hand() -> None:
    """Clusters of 2, 1 and 1 items with values (1, 1), 0, 1: mean 3/4, residual sums 1/2, -3/4, 1/4."""
    found = ratio(np.array([2.0, 0.0, 1.0]), np.array([2.0, 1.0, 1.0]))
    assert found.value == 0.75
    assert found.stderr == pytest.approx(math.sqrt((1 / 4 + 9 / 16 + 1 / 16) * 3 / 2) / 4)


def test_single_items_of_equal_weight_have_the_usual_error(rng) -> None:
    values = rng.normal(size=50)
    assert ratio(values, np.ones(50)).stderr == pytest.approx(scipy.stats.sem(values))


def test_clustered_error_is_that_of_statsmodels(rng) -> None:
    """Weighted least squares on a constant is the ratio estimator; its cluster covariance has G / (G - 1) too."""
    groups = rng.integers(0, 15, 200)
    weights = rng.integers(1, 30, 200).astype(float)
    values = weights * (rng.normal(size=200) + rng.normal(size=15)[groups])
    fit = sm.WLS(values / weights, np.ones(200), weights=weights).fit(
        cov_type="cluster", cov_kwds={"groups": groups, "use_correction": True}
    )
    sums = cluster_sums([str(g) for g in groups], np.stack([values, weights], axis=1))
    found = ratio(sums[:, 0], sums[:, 1])
    assert found.value == pytest.approx(fit.params[0])
    # statsmodels' correction is G / (G - 1) * (n - 1) / (n - k) with k = 1
    assert found.stderr == pytest.approx(fit.bse[0])


def test_p_value_of_single_items_is_the_paired_t_test(rng) -> None:
    first = rng.normal(size=40)
    second = first + rng.normal(0.2, 0.5, size=40)
    found = ratio(second - first, np.ones(40))
    assert p_value(found, 40) == pytest.approx(scipy.stats.ttest_rel(second, first).pvalue)


def test_p_value_where_the_variance_says_nothing() -> None:
    assert p_value(Score(0.0, 0.0), 9) == 1
    assert p_value(Score(-1.0, 0.0), 4) == 2 / 16  # sign test: four of four lost
    assert p_value(Score(-1.0, math.nan), 1) == 1


def test_one_cluster_has_no_known_error() -> None:
    assert math.isnan(ratio(np.array([3.0]), np.array([4.0])).stderr)


def test_design_effect_of_whole_clusters_and_of_none(rng) -> None:
    """Items that are copies of each other count once; independent ones count fully."""
    values = np.repeat(rng.normal(size=400), 5)
    clusters = [str(i // 5) for i in range(2000)]
    assert design_effect(values, np.ones(2000), clusters) == pytest.approx(5, rel=0.01)
    assert design_effect(values, np.ones(2000), [str(i) for i in range(2000)]) == 1
    assert design_effect(rng.normal(size=2000), np.ones(2000), clusters) < 1.3
    assert design_effect(np.zeros(2000), np.ones(2000), clusters) == 5  # nothing seen: the worst


@pytest.mark.parametrize(("by", "clusters"), [(0.7, 7), (0.1, 3), (1 / 3, 3), (0.3, 6)])
def test_equal_differences_are_equal_whatever_rounding_makes_of_them(by: float, clusters: int) -> None:
    found = ratio(np.full(clusters, by), np.ones(clusters))
    assert p_value(found, clusters) == 2 * 0.5**clusters


def test_sign_test_is_that_of_scipy() -> None:
    sums = np.array([-1.0, -3.0, 0.0, 2.0, -1.0, -1.0])
    assert sign_p_value(sums) == pytest.approx(scipy.stats.binomtest(1, 5).pvalue)
    assert sign_p_value(np.zeros(4)) == 1
