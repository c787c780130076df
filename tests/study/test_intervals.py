"""Confidence intervals, frontiers and hypervolumes against hand-worked cases and scipy."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from study.intervals import (
    Interval,
    difference,
    holm,
    hypervolume,
    nondominated,
    over_seeds,
    ratio,
)


def test_an_interval_over_seeds_is_students():
    # mean 2, standard deviation 1, t(0.975, 2) = 4.303: half-width 4.303 / sqrt(3)
    value, low, high, n, p = over_seeds([1.0, 2.0, 3.0])
    assert (value, n) == (2.0, 3) and high - 2.0 == pytest.approx(2.0 - low) == pytest.approx(
        4.3027 / math.sqrt(3), 1e-4
    )
    values = np.random.default_rng(0).normal(size=7)
    expected = stats.ttest_1samp(values, 0.0).confidence_interval()
    assert over_seeds(values)[1:3] == pytest.approx((expected.low, expected.high))
    assert over_seeds(values).p == pytest.approx(stats.ttest_1samp(values, 0.0).pvalue)
    assert p == pytest.approx(stats.ttest_1samp([1.0, 2.0, 3.0], 0.0).pvalue)
    assert over_seeds([1.0, 1.0]) == (1.0, 1.0, 1.0, 2, 0.0)
    assert over_seeds([0.0, 0.0]).p == 1.0
    for single in ([0.5], [0.5, math.nan]):
        assert math.isnan(over_seeds(single).low)


def test_groups_are_paired_by_seed():
    group = pd.Series({0: 1.0, 1: 5.0, 2: 9.0})
    baseline = pd.Series({2: 8.0, 0: 0.0, 1: 4.0, 7: 100.0})
    assert difference(group, baseline)[:3] == (1.0, 1.0, 1.0)  # the difference is 1 in every seed
    assert difference(group, baseline[[2, 0, 1]])[:3] == (1.0, 1.0, 1.0)
    assert difference(group[:1], baseline).value == 1.0  # the only seed that both have
    other_seeds = pd.Series({3: 0.0, 4: 4.0, 5: 8.0})
    welch = stats.ttest_ind(group, other_seeds, equal_var=False)
    low, high = welch.confidence_interval()
    unpaired = difference(group, other_seeds)
    assert unpaired[:4] == (1.0, pytest.approx(low), pytest.approx(high), 3)
    assert unpaired.p == pytest.approx(welch.pvalue)
    assert math.isnan(difference(group[:1], baseline[:1]).low)


def test_holm_corrects_for_the_number_of_hypotheses():
    """Sorted p-values are compared with 0.05 / 4, 0.05 / 3, 0.05 / 2 and 0.05.

    The third p-value exceeds its threshold, so the third and fourth hypotheses fail.
    """
    assert holm([0.04, 0.01, 0.03, 0.015]) == [False, True, False, True]
    assert holm([0.03, 0.04]) == [False, False]  # the smaller exceeds 0.05 / 2
    assert holm([0.02, 0.04]) == [True, True]
    assert holm([0.04, math.nan]) == [True, False]
    assert holm([0.06, math.nan]) == [False, False]
    assert holm([]) == []


def test_a_ratio_is_a_geometric_mean_over_seeds():
    assert ratio(pd.Series({0: 2.0, 1: 8.0}), pd.Series({0: 1.0, 1: 1.0})).value == pytest.approx(
        4.0
    )
    value, low, high, *_ = ratio(
        pd.Series({0: 2.0, 1: 4.0, 2: 3.0}), pd.Series({0: 1.0, 1: 2.0, 2: 1.5})
    )
    assert (value, low, high) == pytest.approx((2.0, 2.0, 2.0))
    assert math.isnan(ratio(pd.Series({0: 2.0, 1: 8.0}), pd.Series({0: 1.0, 1: 0.0})).value)


def test_frontier_and_hypervolume():
    assert nondominated([(1, 1), (1, 1), (0, 0)]) == [0, 1]
    assert hypervolume([(1, 3), (2, 2), (3, 1), (1, 1)], (0, 0)) == 6.0
    assert hypervolume([], (0, 0)) == hypervolume([(0, 5)], (0, 0)) == 0.0


def test_an_estimate_without_an_interval_is_printed_alone():
    assert Interval(-0.17, -0.3, 0.1, 3).text("+.2f") == "-0.17 (-0.30 to +0.10)"
    assert Interval(-0.17, math.nan, math.nan, 1).text("+.2f") == "-0.17"
    assert Interval(0.701, 0.681, 0.721, 3).plus_minus(0, percent=True) == "70 ± 2 %"
    assert Interval(0.701, math.nan, math.nan, 1).plus_minus() == "0.70"
