"""Statistics of comparisons: intervals by the bootstrap, frontiers, hypervolumes."""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


def bootstrap(
    statistic: Callable[[Sequence[T], Sequence[T]], float],
    first: Sequence[T],
    second: Sequence[T],
    resamples: int = 10_000,
    seed: int = 0,
) -> tuple[float, float, float]:
    """A statistic of two samples and its 95 % interval: percentiles over resamples of each (Efron, 1979).

    With few members there are few distinct resamples, each computed once, and the interval is rough.
    """
    rng = np.random.default_rng(seed)
    known: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}
    values = []
    for _ in range(resamples):
        one, two = (tuple(sorted(rng.integers(len(x), size=len(x)).tolist())) for x in (first, second))
        if (one, two) not in known:
            known[one, two] = statistic([first[i] for i in one], [second[i] for i in two])
        values.append(known[one, two])
    finite = [value for value in values if math.isfinite(value)]
    low, high = np.percentile(finite, [2.5, 97.5]).tolist() if finite else (math.nan, math.nan)
    return statistic(first, second), low, high


def nondominated(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which points no other one beats, at least as good in both coordinates and better in one; larger is better.

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
