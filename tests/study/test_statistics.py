"""Intervals, frontiers and hypervolumes against hand-worked cases."""

import math
import statistics

import numpy as np
import pytest

from study.statistics import bootstrap, hypervolume, nondominated, with_interval


def test_bootstrap_frontier_and_hypervolume():
    def difference(a, b):
        return statistics.fmean(a) - statistics.fmean(b)

    value, low, high = bootstrap(difference, [1.0, 2.0, 3.0, 4.0] * 10, [0.0, 1.0] * 20)
    assert value == 2.0 and 1.4 < low < 1.8 and 2.2 < high < 2.6
    value, low, high = bootstrap(difference, [1.0], [0.5])
    assert value == 0.5 and math.isnan(low) and math.isnan(high)  # one member has no spread
    assert nondominated([(1, 1), (1, 1), (0, 0)]) == [0, 1]
    assert hypervolume([(1, 3), (2, 2), (3, 1), (1, 1)], (0, 0)) == 6.0
    assert hypervolume([], (0, 0)) == hypervolume([(0, 5)], (0, 0)) == 0.0


def test_bootstrap_equals_percentiles_of_plain_resampling():
    rng = np.random.default_rng(1)
    first, second = rng.normal(size=6), rng.normal(1.0, 2.0, size=4)
    plain = [rng.choice(first, 6).mean() - rng.choice(second, 4).mean() for _ in range(40_000)]
    found = bootstrap(lambda a, b: statistics.fmean(a) - statistics.fmean(b), first.tolist(), second.tolist())
    assert found[0] == pytest.approx(first.mean() - second.mean())
    assert found[1:] == pytest.approx(np.percentile(plain, [2.5, 97.5]), abs=0.05)
    assert found == bootstrap(lambda a, b: statistics.fmean(a) - statistics.fmean(b), first.tolist(), second.tolist())


def test_bootstrap_of_one_sample_of_any_objects_computes_each_resample_once():
    calls = []

    def mean(runs):
        calls.append(runs)
        return statistics.fmean(run["value"] for run in runs)

    value, low, high = bootstrap(mean, [{"value": x} for x in (1.0, 2.0, 3.0)])
    assert value == 2.0 and low == 1.0 and high == 3.0
    assert len(calls) <= 1 + 10  # three members have ten multisets


def test_bootstrap_has_no_interval_where_resamples_have_no_value(recwarn):
    def ratio(a, b):
        return statistics.fmean(a) / statistics.fmean(b) if statistics.fmean(b) else math.nan

    value, low, high = bootstrap(ratio, [1.0, 1.0], [0.0, 2.0])
    assert value == 1.0 and math.isnan(low) and math.isnan(high) and not recwarn.list  # of four resamples one has none
    value, low, high = bootstrap(ratio, [1.0, 1.0], [0.0, 2.0, 2.0, 2.0])  # one of 256
    assert (value, low, high) == (1 / 1.5, 0.5, 2.0) and not recwarn.list
    assert all(math.isnan(x) for x in bootstrap(ratio, [1.0, 1.0], [0.0, 0.0]))


def test_resamples_must_have_so_many_distinct_members(recwarn):
    samples = [[0.0, 1.0, 3.0], [0.0, 2.0, 6.0]]
    found = bootstrap(lambda a, b: statistics.variance(a) / statistics.variance(b), *samples, distinct=2)
    assert found == pytest.approx((0.25, (1 / 3) / 12, 3 / (4 / 3))) and not recwarn.list
    assert math.isnan(bootstrap(lambda a: statistics.variance(a), [1.0, 2.0], distinct=2)[1])


def test_an_interval_is_printed_where_there_is_one():
    assert with_interval((-0.17, -0.3, 0.1), "+.0%") == "-17% (-30% to +10%)"
    assert with_interval((-0.17, math.nan, math.nan), "+.0%") == "-17%"
