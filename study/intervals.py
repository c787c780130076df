"""95 % intervals: Student's t over seeds; frontiers and hypervolumes."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd
from scipy import stats

LEVEL = 0.95
FEWEST = 5  # seeds for a verdict


class Interval(NamedTuple):
    """A value, the ends of its 95 % interval (NaN where there is none), and the number of seeds or queries.

    p: the two-sided p-value of Student's t for a true value of 0 (of ratios, 1); NaN where it was not computed.
    """

    value: float
    low: float
    high: float
    n: int
    p: float = math.nan

    def __str__(self) -> str:
        return self.text(".2f")

    def text(self, form: str) -> str:
        """`0.15 (0.10 to 0.20)`, or the value alone without an interval; `form` is a number's format."""
        value, low, high = (format(number, form) for number in (self.value, self.low, self.high))
        return value if math.isnan(self.low) else f"{value} ({low} to {high})"

    def plus_minus(self, digits: int = 2, percent: bool = False) -> str:
        """`0.15 ± 0.05`, or the value alone; for intervals with the value in their middle."""
        scale, unit = (100, " %") if percent else (1, "")
        value = f"{scale * self.value:.{digits}f}"
        half = "" if math.isnan(self.high) else f" ± {scale * (self.high - self.value):.{digits}f}"
        return value + half + unit


def over_seeds(values: Sequence[float] | pd.Series) -> Interval:
    """The mean of one value per seed, and its interval by Student's t.

    A single seed has no interval, nor have values of which one is not finite.
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
    """The difference of two groups' means, by Student's t.

    Runs of one seed draw the same queries in the same order, so they are paired: the interval is that of the
    differences seed by seed. Where no two seeds are in both groups it is Welch's.

    Args:
        ours, theirs: a value per seed, indexed by seed.
    """
    seeds = ours.index.intersection(theirs.index)
    if len(seeds) > 1 or len(ours) == len(theirs) == len(seeds):
        return over_seeds(ours[seeds] - theirs[seeds])
    value = float(ours.mean() - theirs.mean())
    n = min(len(ours), len(theirs))
    if n < 2:
        return Interval(value, math.nan, math.nan, n)
    test = stats.ttest_ind(ours, theirs, equal_var=False)
    low, high = test.confidence_interval(LEVEL)
    return Interval(value, float(low), float(high), n, float(test.pvalue))


def direction(interval: Interval, equal: float = 0.0) -> str:
    """What a difference says, or a ratio where `equal` is 1: `lower`, `higher` or `undecided`.

    Nothing with fewer than 5 seeds or no interval.
    """
    if interval.n < FEWEST or math.isnan(interval.low):
        return ""
    if interval.high < equal:
        return "lower"
    return "higher" if interval.low > equal else "undecided"


def holm(p_values: Sequence[float]) -> list[bool]:
    """Which of several hypotheses are rejected when the chance of one false rejection is to be at most `1 - LEVEL`.

    The smallest p-value is held against that level over their number, the next against it over one less, and so on
    until one fails (Holm, 1979). A NaN is no test, and does not count.

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
    """The geometric mean of one value per seed: Student's t on the logarithms. NaN where one is not above 0."""
    values = [float(value) for value in values]
    if not all(value > 0 for value in values):
        return over_seeds([math.nan] * len(values))
    logs = over_seeds([math.log(value) for value in values])
    return Interval(math.exp(logs.value), math.exp(logs.low), math.exp(logs.high), logs.n, logs.p)


def ratio(ours: pd.Series, theirs: pd.Series) -> Interval:
    """The geometric mean of the ratios seed by seed, with its interval. NaN where a value is not above 0."""
    seeds = ours.index.intersection(theirs.index)
    both_positive = (ours[seeds] > 0) & (theirs[seeds] > 0)
    return geometric((ours[seeds] / theirs[seeds]).where(both_positive))


def nondominated(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other dominates (as good in both coordinates, better in one); larger is better.

    >>> nondominated([(0, 2), (1, 1), (0, 1), (2, 0)])
    [0, 1, 3]
    """

    def dominated(x: float, y: float) -> bool:
        return any(a >= x and b >= y and (a, b) != (x, y) for a, b in points)

    return [i for i, point in enumerate(points) if not dominated(*point)]


def hypervolume(points: Sequence[tuple[float, float]], worst: tuple[float, float]) -> float:
    """The area that points dominate, larger being better in both coordinates, above and right of `worst`.

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
