"""Estimates by which claims are judged: of two groups of runs or of one, with a confidence interval over seeds.

An estimate is made by a function of the `Evidence`; `study/claims.py` names one for each claim.
"""

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from study.measures import collapsed, end, final, halves_of_kl, variance_change
from study.records import Record, flat
from study.statistics import bootstrap, hypervolume, over

PPO, CORY = "PPO", "CORY"
M = TypeVar("M")
mean = statistics.fmean


class Untested(Exception):
    """Why a claim cannot be judged."""


class Elsewhere(Untested):
    """What it is judged by is not here: on another machine, or not made yet."""


@dataclass(frozen=True)
class Estimate:
    """An estimate with its confidence interval: the ends of the 95 % interval, and the number of seeds on each side."""

    value: float
    low: float
    high: float
    seeds: tuple[int, ...]

    def verdict(self, holds: tuple[float, float]) -> str:
        """Whether the interval lies where a claim needs it."""
        if not all(map(math.isfinite, (self.value, self.low, self.high))) or min(self.seeds) < 2:
            return "not tested"
        if holds[0] < self.low and self.high < holds[1]:
            return "reproduced"
        outside = self.high <= holds[0] or self.low >= holds[1]
        return f"not reproduced ({'contradicted' if outside else 'undecided'})"

    def __str__(self) -> str:
        count = " and ".join(map(str, dict.fromkeys(self.seeds)))
        interval = "" if math.isnan(self.low) else f"{self.low:.2f} to {self.high:.2f}; "  # one seed has none
        return f"{self.value:.2f} ({interval}n = {count})"


@dataclass(frozen=True)
class Evidence:
    """An experiment that has ended.

    Args:
        runs: by name. values: of the experiment's `over`, in its order; empty where it has none.
        over: that key. evaluation: where the evaluation's rows are, if there are any.
    """

    runs: dict[str, list[Record]]
    values: list[Any]
    over: str | None
    evaluation: Path

    def of(self, name: str, value: Any = None) -> list[Record]:
        """The runs of a name, and of a value if one is given."""
        found = self.runs.get(name, [])
        if value is not None:
            found = [run for run in found if self.value(run) == value]
        if not found:
            raise Untested(f"no runs of {name} at this scale")
        return found

    def value(self, run: Record) -> Any:
        """A run's value of `over`."""
        return flat(run.settings)[self.over] if self.over else None

    def by_seed(self, name: str) -> list[list[Record]]:
        """The runs of each seed, at all values."""
        seeds: dict[Any, list[Record]] = {}
        for run in self.of(name):
            seeds.setdefault(run.settings["seed"], []).append(run)
        return list(seeds.values())


def between(
    first: str,
    second: str,
    of: Callable[[Record], M],
    statistic: Callable[[Sequence[M], Sequence[M]], float],
    distinct: int = 1,
) -> Callable[[Evidence], Estimate]:
    """An estimate from what `of` gives for each run of two groups. `distinct`: see `bootstrap`."""

    def of_both(evidence: Evidence) -> Estimate:
        one, two = ([of(run) for run in evidence.of(name)] for name in (first, second))
        return estimate(statistic, one, two, distinct)

    return of_both


def measured(
    name: str, of: Callable[[Record], M], statistic: Callable[[Sequence[Any]], float] = mean
) -> Callable[[Evidence], Estimate]:
    """An estimate from one group of runs."""
    return lambda evidence: estimate(statistic, [of(run) for run in evidence.of(name)])


def over_values(
    name: str, of: Callable[[Record], M], statistic: Callable[[Sequence[M]], float]
) -> Callable[[Evidence], Estimate]:
    """An estimate from a group's runs at all values together; seeds are resampled, each with its runs at all values."""

    def of_seeds(evidence: Evidence) -> Estimate:
        seeds = [[of(run) for run in runs] for runs in evidence.by_seed(name)]
        return estimate(lambda drawn: statistic([one for seed in drawn for one in seed]), seeds)

    return of_seeds


def estimate(
    statistic: Callable[..., float], one: Sequence[M], two: Sequence[M] | None = None, distinct: int = 1
) -> Estimate:
    """A statistic of one or two samples of runs, with its interval."""
    seeds = (len(one),) if two is None else (len(one), len(two))
    return Estimate(*bootstrap(statistic, one, two, distinct=distinct), seeds)


def ratio(one: Sequence[float], two: Sequence[float]) -> float:
    """A ratio of means."""
    return over(mean(one), mean(two))


def difference(one: Sequence[float], two: Sequence[float]) -> float:
    """A difference of means."""
    return mean(one) - mean(two)


def relative(one: Sequence[float], two: Sequence[float]) -> float:
    """A difference of means over the size of the second."""
    return over(mean(one) - mean(two), abs(mean(two)))


def of_gain(one: Sequence[tuple[float, float]], two: Sequence[tuple[float, float]]) -> float:
    """Difference of the means of the first numbers, over the second side's mean gain, its second numbers."""
    return over(mean(x for x, _ in one) - mean(x for x, _ in two), mean(gain for _, gain in two))


def share(runs: Sequence[tuple[float, float]]) -> float:
    """The mean of the first numbers over that of the second ones."""
    return over(mean(x for x, _ in runs), mean(y for _, y in runs))


def less_variance(cory: Sequence[Sequence[float]], ppo: Sequence[Sequence[float]]) -> float:
    """1 - CORY's training variance over PPO's."""
    return -variance_change(cory, ppo)


def collapses(weight: float) -> Callable[[Evidence], Estimate]:
    """PPO's collapse rate times `weight`, minus CORY's; seeds are resampled, each with its runs at all values."""

    def of(evidence: Evidence) -> Estimate:
        ppo, cory = ([mean(map(collapsed, runs)) for runs in evidence.by_seed(name)] for name in (PPO, CORY))
        if not any(ppo + cory):
            raise Untested("no run collapsed")
        return estimate(lambda one, two: weight * mean(one) - mean(two), ppo, cory)

    return of


def at(name: str, index: int, of: Callable[[Record], M]) -> Callable[[Evidence], list[M]]:
    """What `of` gives for the runs of a name at one of the values, by its place among them sorted."""
    return lambda evidence: [of(run) for run in evidence.of(name, sorted(evidence.values)[index])]


def values_apart(
    first: int, second: int, metric: str, statistic: Callable[[Sequence[float], Sequence[float]], float]
) -> Callable[[Evidence], Estimate]:
    """CORY's runs at two of the values."""
    one, two = (at(CORY, index, end(metric)) for index in (first, second))
    return lambda evidence: estimate(statistic, one(evidence), two(evidence))


def kl_accelerates(evidence: Evidence) -> Estimate:
    """Ratio of the increase of PPO's KL in the second half of a run to that in the first, at the smallest value."""
    return estimate(share, at(PPO, 0, halves_of_kl)(evidence))


def frontiers_apart(evidence: Evidence) -> Estimate:
    """CORY's hypervolume minus PPO's, over that of all points; seeds are resampled, with their runs at all values."""

    def ends(name: str) -> list[list[tuple[Any, float, float]]]:
        return [
            [(evidence.value(run), final(run, "task_reward"), -final(run, "kl")) for run in runs]
            for runs in evidence.by_seed(name)
        ]

    def points(seeds: Sequence[Sequence[tuple[Any, float, float]]]) -> list[tuple[float, float]]:
        at: dict[Any, list[tuple[float, float]]] = {}
        for value, reward, kl in (run for runs in seeds for run in runs):
            at.setdefault(value, []).append((reward, kl))
        return [(mean(x for x, _ in runs), mean(y for _, y in runs)) for runs in at.values()]

    cory, ppo = ends(CORY), ends(PPO)
    every = points(cory) + points(ppo)
    worst = (min(x for x, _ in every), min(y for _, y in every))
    whole = hypervolume(every, worst)
    statistic = lambda one, two: over(  # noqa: E731
        hypervolume(points(one), worst) - hypervolume(points(two), worst), whole
    )
    return estimate(statistic, cory, ppo)


def passes(other: str) -> Callable[[Evidence], Estimate]:
    """The smallest difference over k of CORY's pass@k, mean over its agents alone, to that of PPO or of the base."""

    def of(evidence: Evidence) -> Estimate:
        runs: dict[str, dict[str, list[list[float]]]] = {"base": {}, PPO: {}, CORY: {}}
        kinds = {"base": "base"} | {run.folder.name: kind for kind in (PPO, CORY) for run in evidence.of(kind)}
        try:
            for row in json.loads(evidence.evaluation.read_text(encoding="utf-8"))["rows"]:
                if " after " in row["name"]:
                    continue  # agents in a chain, or one as its own observer
                folder = row["name"].split("/")[0]
                kind = kinds.get(folder)
                if kind is None:
                    continue  # of another method
                alone = [row[key] for key in row if key.startswith("pass@") and not key.endswith("_ci")]
                runs[kind].setdefault(folder, []).append(alone)
        except FileNotFoundError:
            raise Elsewhere("no evaluation") from None
        except (ValueError, TypeError, KeyError):
            raise Untested(f"{evidence.evaluation.name} is damaged") from None
        if not len(runs[CORY]) == len(evidence.of(CORY)) or not runs["base"] or not runs[PPO]:
            raise Untested("the evaluation is of other runs")
        cory, rivals = ([*map(means, runs[kind].values())] for kind in (CORY, other))
        smallest = lambda a, b: min(x - y for x, y in zip(means(a), means(b), strict=True))  # noqa: E731
        if other == PPO:
            return estimate(smallest, cory, rivals)
        return estimate(lambda ours: smallest(ours, rivals), cory)  # the base is one model, without seeds

    return of


def means(rows: Sequence[Sequence[float]]) -> list[float]:
    """The mean of each column."""
    return [mean(values) for values in zip(*rows, strict=True)]
