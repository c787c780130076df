"""Statistics of comparisons: bootstrap intervals, frontiers, hypervolumes."""

import math
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

UNDEFINED = 0.05  # share of resamples without a value above which there is no interval
Interval = tuple[float, float, float]  # a value, and the ends of its 95 % interval


def bootstrap(
    statistic: Callable[..., float],
    first: Sequence[Any],
    second: Sequence[Any] | None = None,
    resamples: int = 10_000,
    seed: int = 0,
    distinct: int = 1,
) -> Interval:
    """A statistic of one or two samples and its 95 % interval: percentiles over resamples of each (Efron, 1979).

    With few members there are few distinct resamples, each computed once, and the interval is rough.

    Args:
        statistic: takes as many sequences as there are samples; members may be any objects.
        distinct: members that each resample must have; others are left out. 2 for a variance.

    Returns:
        the value and the ends of the interval. They are NaN where a sample has no more members than `distinct`, and
        where the statistic is not finite for more than one resample in twenty, as a ratio whose denominator may be 0.
    """
    from scipy import stats  # here, as importing it takes a while

    samples = [first] if second is None else [first, second]
    value = statistic(*samples)
    if min(map(len, samples)) <= distinct:
        return value, math.nan, math.nan

    @cache
    def of(*drawn: tuple[int, ...]) -> float:
        if min(len(set(places)) for places in drawn) < distinct:
            return math.inf  # left out
        return statistic(*([sample[i] for i in places] for sample, places in zip(samples, drawn, strict=True)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of values that are not finite
        distribution = stats.bootstrap(
            [np.arange(len(sample)) for sample in samples],
            lambda *drawn: of(*(tuple(sorted(places.tolist())) for places in drawn)),
            n_resamples=resamples,
            vectorized=False,
            method="percentile",
            random_state=np.random.default_rng(seed),
        ).bootstrap_distribution
    kept = distribution[distribution != math.inf]
    finite = kept[np.isfinite(kept)]
    if finite.size < (1 - UNDEFINED) * kept.size:
        return value, math.nan, math.nan
    low, high = np.percentile(finite, [2.5, 97.5]).tolist()
    return value, low, high


def with_interval(interval: Interval, form: str) -> str:
    """`0.15 (0.10 to 0.20)`, or the value alone where there is no interval; `form` is a number's format."""
    value, low, high = (format(number, form) for number in interval)
    return value if math.isnan(interval[1]) else f"{value} ({low} to {high})"


def over(a: float, b: float) -> float:
    """A ratio; undefined where the denominator is not above 0."""
    return a / b if b > 0 else math.nan


def nondominated(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other dominates (as good in both coordinates, better in one); larger is better.

    >>> nondominated([(0, 2), (1, 1), (0, 1), (2, 0)])
    [0, 1, 3]
    """
    return [i for i, (x, y) in enumerate(points) if not any(a >= x and b >= y and (a, b) != (x, y) for a, b in points)]


def hypervolume(points: Sequence[tuple[float, float]], worst: tuple[float, float]) -> float:
    """The area that points dominate, larger being better in both coordinates, above and right of `worst`.

    >>> hypervolume([(1, 2), (2, 1)], (0, 0))
    3.0
    """
    area, height = 0.0, worst[1]
    for x, y in sorted(points, reverse=True):
        if x > worst[0] and y > height:
            area += (x - worst[0]) * (y - height)
            height = y
    return float(area)
