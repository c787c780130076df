"""Computes confidence intervals by Student's t over seeds, and hypervolumes of frontiers."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd
from scipy import stats

LEVEL = 0.95
FEWEST = 5  # the smallest number of seeds for a verdict


class Interval(NamedTuple):
    """A value with its 95 % confidence interval.

    Args:
        value: the value.
        low, high: the interval's ends; NaN if there is none.
        n: the number of seeds or queries.
        p: the two-sided p-value of a t-test that the true value is 0 (for a ratio, 1); NaN if not computed.
    """

    value: float
    low: float
    high: float
    n: int
    p: float = math.nan

    def __str__(self) -> str:
        return self.text(".2f")

    def text(self, form: str) -> str:
        """Formats `0.15 (0.10 to 0.20)`, or only the value if there is no interval; `form` is the numbers' format."""
        value, low, high = (format(number, form) for number in (self.value, self.low, self.high))
        return value if math.isnan(self.low) else f"{value} ({low} to {high})"

    def plus_minus(self, digits: int = 2, percent: bool = False) -> str:
        """Formats `0.15 ± 0.05`, or only the value if there is no interval. The interval must be symmetric."""
        scale, unit = (100, " %") if percent else (1, "")
        value = f"{scale * self.value:.{digits}f}"
        half = "" if math.isnan(self.high) else f" ± {scale * (self.high - self.value):.{digits}f}"
        return value + half + unit


def over_seeds(values: Sequence[float] | pd.Series) -> Interval:
    """Averages one value per seed, with an interval by Student's t.

    There is no interval for a single seed, or if a value is not finite.
    """
    values = [float(value) for value in values]
    n = len(values)
    if n == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    mean = sum(values) / n
    if n == 1 or not math.isfinite(mean):
        return Interval(mean, math.nan, math.nan, n)
    variance = sum((value - mean) ** 2 for value in values) / (n - 1)
    error = math.sqrt(variance / n)
    half = float(stats.t.ppf((1 + LEVEL) / 2, n - 1)) * error
    errors_from_0 = abs(mean) / error if error else math.inf if mean else 0.0
    p = 2 * float(stats.t.sf(errors_from_0, n - 1))
    return Interval(mean, mean - half, mean + half, n, p)


def difference(ours: pd.Series, theirs: pd.Series) -> Interval:
    """Returns the difference of two groups' means, with an interval by Student's t.

    Runs with the same seed draw the same queries in the same order. They are paired, so the interval is computed from
    the differences by seed. If the groups share fewer than two seeds and both have more, Welch's interval is used.

    Args:
        ours, theirs: one value per seed, indexed by seed.
    """
    seeds = ours.index.intersection(theirs.index)
    if len(seeds) > 1 or len(seeds) == min(len(ours), len(theirs)):
        return over_seeds(ours[seeds] - theirs[seeds])
    value = float(ours.mean() - theirs.mean())
    n = min(len(ours), len(theirs))
    if n < 2:
        return Interval(value, math.nan, math.nan, n)
    test = stats.ttest_ind(ours, theirs, equal_var=False)
    low, high = test.confidence_interval(LEVEL)
    return Interval(value, float(low), float(high), n, float(test.pvalue))


def direction(interval: Interval, equal: float = 0.0) -> str:
    """Returns the verdict of a difference, or of a ratio if `equal` is 1: `lower`, `higher` or `undecided`.

    The verdict is empty with fewer than 5 seeds or without an interval.
    """
    if interval.n < FEWEST or math.isnan(interval.low):
        return ""
    if interval.high < equal:
        return "lower"
    return "higher" if interval.low > equal else "undecided"


def holm(p_values: Sequence[float]) -> list[bool]:
    """Returns which hypotheses are rejected with a family-wise error rate of at most `1 - LEVEL` (Holm, 1979).

    The smallest of m p-values is compared with (1 - LEVEL) / m, the next with (1 - LEVEL) / (m - 1), and so on until
    one exceeds its bound. A p-value of NaN does not count as a test.

    >>> holm([0.01, 0.04, 0.03])  # 0.01 against 0.05 / 3, then 0.03 against 0.05 / 2
    [True, False, False]
    """
    tested = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    rejected = [False] * len(p_values)
    for rank, (p, i) in enumerate(tested):
        if p > (1 - LEVEL) / (len(tested) - rank):
            break
        rejected[i] = True
    return rejected


def geometric(values: Sequence[float] | pd.Series) -> Interval:
    """Averages one value per seed geometrically, with Student's t on the logarithms; NaN if a value is not above 0."""
    values = [float(value) for value in values]
    if not all(value > 0 for value in values):
        return over_seeds([math.nan] * len(values))
    logs = over_seeds([math.log(value) for value in values])
    return Interval(math.exp(logs.value), math.exp(logs.low), math.exp(logs.high), logs.n, logs.p)


def ratio(ours: pd.Series, theirs: pd.Series) -> Interval:
    """Returns the geometric mean of the ratios by seed, with its interval; NaN if a value is not above 0."""
    seeds = ours.index.intersection(theirs.index)
    both_positive = (ours[seeds] > 0) & (theirs[seeds] > 0)
    return geometric((ours[seeds] / theirs[seeds]).where(both_positive))


def nondominated(points: Sequence[tuple[float, float]]) -> list[int]:
    """Returns the indices of points that no other point dominates; larger coordinates are better.

    A point dominates another if it is at least as good in both coordinates and better in one.

    >>> nondominated([(0, 2), (1, 1), (0, 1), (2, 0)])
    [0, 1, 3]
    """

    def dominated(x: float, y: float) -> bool:
        return any(a >= x and b >= y and (a, b) != (x, y) for a, b in points)

    return [i for i, point in enumerate(points) if not dominated(*point)]


def hypervolume(points: Sequence[tuple[float, float]], worst: tuple[float, float]) -> float:
    """Returns the area that the points dominate above and to the right of `worst`; larger coordinates are better.

    >>> hypervolume([(1, 2), (2, 1)], (0, 0))
    3.0
    """
    area = 0.0
    height = worst[1]
    for x, y in sorted(points, reverse=True):
        if x > worst[0] and y > height:
            area += (x - worst[0]) * (y - height)
            height = y
    return float(area)
