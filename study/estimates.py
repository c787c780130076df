"""Estimates by which claims are judged: a number per seed, and Student's t over the seeds.

A *measure* makes one number of one run's rows of the tidy frame. An *estimate* makes an interval of a study: it names
groups of runs, takes a measure of each run, and pairs the groups by seed. `study/claims.py` has one for each claim.
"""

import math
from collections.abc import Callable
from typing import Any

import pandas as pd

from study.collapse import collapse_times, planned_iterations
from study.frame import LAST, LIMIT, RUN, Study
from study.intervals import Interval, difference, over_seeds

PPO, CORY = "PPO", "CORY"
Measure = Callable[[pd.DataFrame], float]  # of the rows of one run
Statistic = Callable[[pd.Series, pd.Series], Interval]  # of two groups, a value per seed each
Estimate = Callable[[Study], Interval]


class Untested(Exception):
    """Why a claim cannot be judged."""


# Measures of one run.


def end(metric: str) -> Measure:
    """A metric over the last 10 iterations, mean over agents."""
    return lambda run: window(run, metric, length(run))


def length(run: pd.DataFrame) -> int:
    """The run's iterations."""
    return int(run["iteration"].max()) + 1


def window(run: pd.DataFrame, metric: str, stop: int) -> float:
    """Mean over agents and the 10 iterations before `stop`."""
    rows = run[(run["iteration"] >= stop - LAST) & (run["iteration"] < stop)]
    return float(rows[metric].mean())


def start(run: pd.DataFrame) -> float:
    """Task reward of the first role (or PPO's only agent) in the first iteration, before any update."""
    first = run[(run["iteration"] == 0) & (run["role"] == run["first_role"])]
    return float(first["task_reward"].iloc[0])


def gain(run: pd.DataFrame) -> float:
    """How far the task reward at the end is above that of the start."""
    return end("task_reward")(run) - start(run)


def early_gain(run: pd.DataFrame) -> float:
    """Gain in task reward by iterations 11 to 20."""
    return window(run, "task_reward", 2 * LAST) - start(run)


def rise(run: pd.DataFrame) -> float:
    """Change of the combined reward from the first 10 iterations to the last 10."""
    return window(run, "combined_reward", length(run)) - window(run, "combined_reward", LAST)


def decline(run: pd.DataFrame) -> float:
    """How far the task reward of the last 10 iterations is below that of the 10 about the middle."""
    return window(run, "task_reward", length(run) // 2 + LAST // 2) - end("task_reward")(run)


def growth_of_kl(run: pd.DataFrame) -> float:
    """The increase of the KL in the last 10 iterations."""
    return end("kl")(run) - window(run, "kl", length(run) - LAST)


def first_half_of_kl(run: pd.DataFrame) -> float:
    """The KL at half time."""
    return window(run, "kl", length(run) // 2 + LAST // 2)


def second_half_of_kl(run: pd.DataFrame) -> float:
    """The increase of the KL from half time to the end."""
    return end("kl")(run) - first_half_of_kl(run)


def unsteadiness(run: pd.DataFrame) -> float:
    """Standard deviation of a role's task reward around its running mean over 10 iterations, mean over roles.

    By role, as the mean over agents is of more responses the more agents there are, and so is steadier by itself.
    """
    spreads = []
    for _, rows in run.groupby("role"):
        rewards = rows.sort_values("iteration")["task_reward"].reset_index(drop=True)
        running = rewards.rolling(LAST).mean().shift(-(LAST // 2 - 1))  # from 5 before to 4 after
        spreads.append(float((rewards - running).dropna().std(ddof=0)))
    return sum(spreads) / len(spreads)


def distance_of_agents(run: pd.DataFrame) -> float:
    """How far apart the agents' combined rewards end."""
    ends = [end("combined_reward")(rows) for _, rows in run.groupby("agent")]
    return max(ends) - min(ends)


def share_of_limit(run: pd.DataFrame) -> float:
    """Length of the first role's responses at the end over the longest allowed."""
    of_first = run[run["role"] == run["first_role"]]
    return end("response_tokens")(of_first) / float(run["limit"].iloc[0])


# A measure of every run of some groups.


def by_seed(study: Study, family: str, measure: Measure, value: str | None = None) -> pd.Series:
    """A measure of the runs of a family, by seed; at one value of the study's `over`, or the mean over all.

    Raises:
        Untested: there are no such runs, or none of their metrics.
    """
    runs = study.runs[study.runs["family"] == family]
    if value is not None:
        runs = runs[runs["value"] == value]
    if not len(runs):
        raise Untested(f"no runs of {family} at this scale")
    values: dict[Any, list[float]] = {}
    rows = dict(list(study.metrics.groupby(["group", "seed"])))
    for run in runs.to_dict("records"):
        if (run["group"], run["seed"]) not in rows:
            raise Untested(f"no metrics of {run['group']}, seed {run['seed']}, at this scale")
        metrics = rows[run["group"], run["seed"]].assign(
            limit=run.get(LIMIT, math.nan), first_role=run["first_role"]
        )
        values.setdefault(run["seed"], []).append(measure(metrics))
    return pd.Series({seed: sum(of) / len(of) for seed, of in values.items()}).sort_index()


def sorted_values(study: Study) -> list[str]:
    """The values of the study's `over`, in the order of their size."""
    return sorted({value for value in study.runs["value"] if value}, key=float)


# Estimates.


def between(first: str, second: str, measure: Measure, statistic: Statistic) -> Estimate:
    """A statistic of a measure of two groups of runs."""

    return lambda study: statistic(by_seed(study, first, measure), by_seed(study, second, measure))


def per_gain(first: str, second: str, metric: str) -> Estimate:
    """The difference of a metric at the end, over the second group's mean gain in task reward, taken as given."""

    def estimate(study: Study) -> Interval:
        apart = difference(by_seed(study, first, end(metric)), by_seed(study, second, end(metric)))
        return _scaled(apart, float(by_seed(study, second, gain).mean()))

    return estimate


def measured(name: str, measure: Measure) -> Estimate:
    """A measure of one group of runs."""
    return lambda study: over_seeds(by_seed(study, name, measure))


def share(name: str, part: Measure, whole: Measure) -> Estimate:
    """A measure over another, of one group of runs; over all values, if the study has several."""
    return lambda study: over_seeds(_over(by_seed(study, name, part), by_seed(study, name, whole)))


def agents(name: str, metric: str, statistic: Statistic) -> Estimate:
    """A statistic of a metric at the end, of a group's first agent and of its second."""

    def of(agent: str) -> Measure:
        return lambda run: end(metric)(run[run["agent"] == agent])

    return lambda study: statistic(
        by_seed(study, name, of("agent_1")), by_seed(study, name, of("agent_2"))
    )


def _scaled(interval: Interval, scale: float) -> Interval:
    """An interval over a number; undefined where that is not above 0."""
    scale = scale if scale > 0 else math.nan
    return Interval(interval.value / scale, interval.low / scale, interval.high / scale, interval.n)


def _over(part: pd.Series, whole: pd.Series) -> pd.Series:
    """Shares; undefined where the whole is not above 0."""
    return part / whole.where(whole > 0)


def collapses(study: Study) -> Interval:
    """CORY's time to collapse minus PPO's, mean over all values; the planned iterations for runs that never do."""
    times = collapse_times(study).min(axis=1)
    if not times.notna().any():
        raise Untested("no run collapsed")
    runs = times.fillna(planned_iterations(study)).rename("time").reset_index()
    runs = runs.merge(study.runs[[*RUN, "family"]], on=RUN)
    means = runs.groupby(["family", "seed"])["time"].mean()
    return difference(means[CORY], means[PPO])


def texts_collapse(study: Study) -> Interval:
    """The share of PPO's runs whose texts repeat themselves on the way, minus CORY's."""
    collapsed = collapse_times(study)["texts"].notna().astype(float)
    if not collapsed.any():
        raise Untested("no run's texts repeat themselves")
    return difference(collapsed.loc[PPO], collapsed.loc[CORY])


def kl_accelerates(study: Study) -> Interval:
    """Ratio of the increase of PPO's KL in the second half of a run to that in the first, at the smallest value."""
    smallest = sorted_values(study)[0]
    second, first = (
        by_seed(study, PPO, half, smallest) for half in (second_half_of_kl, first_half_of_kl)
    )
    return over_seeds(_over(second, first))


def passes(rival: str | None) -> Estimate:
    """The smallest difference over k of CORY's pass@k, mean over its agents solo, to that of PPO or of the base.

    The ends of the interval are the smallest ends over k: all differences are above 0 if the lower end is.
    """

    def estimate(study: Study) -> Interval:
        held_out = study.held_out
        ks = [key for key in held_out if str(key).startswith("pass@")]
        solo = held_out[held_out["calls"] == 1]
        ours = solo[solo["group"] == CORY].groupby("seed")[ks].mean()
        if not ks or not len(ours):
            raise Untested("no evaluation")
        if rival is None:
            base = solo[solo["agent"] == "base"]
            if not len(base):
                raise Untested("no evaluation of the base")
            intervals = [over_seeds(ours[k] - float(base[k].iloc[0])) for k in ks]
        else:
            theirs = solo[solo["group"] == rival].groupby("seed")[ks].mean()
            if not len(theirs):
                raise Untested(f"no evaluation of {rival}")
            intervals = [difference(ours[k], theirs[k]) for k in ks]
        smallest = [min(numbers) for numbers in zip(*intervals, strict=True)]
        return Interval(smallest[0], smallest[1], smallest[2], int(smallest[3]))

    return estimate
