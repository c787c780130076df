"""Computes the estimates that judge claims: a number per seed, and Student's t over seeds.

A *measure* computes one number from one run's metrics. An *estimate* computes an interval from a study: it applies a
measure to each run of one or two groups (a group's runs differ only in their seed), and pairs two groups by seed.
`results/claims.py` has an estimate for each claim.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import pandas as pd

from study.collapse import collapse_times, planned_iterations
from study.frame import BASE, LAST, LIMIT, RUN, Study
from study.held_out import held_out_by_seed, judged_by
from study.intervals import Interval, difference, over_seeds, ratio

PPO, CORY = "PPO", "CORY"
Measure = Callable[[pd.DataFrame], float]  # takes the metrics of one run
Statistic = Callable[[pd.Series, pd.Series], Interval]  # takes two groups' values by seed
Estimate = Callable[[Study], Interval]

NOT_RUN, OPEN, NOT_TESTABLE = "not run", "open", "not testable here"


class Untested(Exception):
    """Raised if a claim has no estimate. Arguments: the text shown as the claim's direction, and the reason."""


def prepared(study: Study) -> Study:
    """Adds the columns that measures need to the metrics."""
    times = collapse_times(study)
    run_columns = study.runs[[*RUN, "first_role", LIMIT]].drop_duplicates(RUN)
    run_columns = run_columns.join(
        times.assign(first=times.min(axis=1))[["texts", "first"]], on=RUN
    )
    run_columns = run_columns.rename(columns={"texts": "texts_collapse", "first": "collapse"})
    planned = planned_iterations(study)
    metrics = study.metrics.merge(run_columns.assign(planned=planned), on=RUN)
    return replace(study, metrics=metrics)


# Measures of one run.


def window(run: pd.DataFrame, metric: str, stop: int) -> float:
    """Returns a metric's mean over agents and over the 10 iterations before `stop`."""
    rows = run[(run["iteration"] >= stop - LAST) & (run["iteration"] < stop)]
    return float(rows[metric].mean())


def length(run: pd.DataFrame) -> int:
    """Returns the number of iterations."""
    return int(run["iteration"].max()) + 1


def end(metric: str) -> Measure:
    """Makes a measure: a metric's mean over the last 10 iterations."""
    return lambda run: window(run, metric, length(run))


def middle(metric: str) -> Measure:
    """Makes a measure: a metric's mean over the 10 iterations around half time."""
    return lambda run: window(run, metric, length(run) // 2 + LAST // 2)


def over(part: Measure, whole: Measure) -> Measure:
    """Makes a measure: one measure divided by another; NaN if the divisor is not above 0."""
    return lambda run: part(run) / whole(run) if whole(run) > 0 else math.nan


def of_agent(name: str, measure: Measure) -> Measure:
    """Makes a measure: another measure, of one agent only."""
    return lambda run: measure(run[run["agent"] == name])


def start(run: pd.DataFrame) -> float:
    """Returns the first role's task reward before any update."""
    first = run[(run["iteration"] == 0) & (run["role"] == run["first_role"])]
    return float(first["task_reward"].iloc[0])


def gain(run: pd.DataFrame) -> float:
    """Returns the final task reward minus the task reward before any update."""
    return end("task_reward")(run) - start(run)


def early_gain(run: pd.DataFrame) -> float:
    """Returns the gain in task reward at iterations 11 to 20."""
    return window(run, "task_reward", 2 * LAST) - start(run)


def rise(run: pd.DataFrame) -> float:
    """Returns the combined reward of the last 10 iterations minus the first 10 iterations' combined reward."""
    return end("combined_reward")(run) - window(run, "combined_reward", LAST)


def decline(run: pd.DataFrame) -> float:
    """Returns the task reward at half time minus the final task reward."""
    return middle("task_reward")(run) - end("task_reward")(run)


def late_growth(run: pd.DataFrame) -> float:
    """Returns the final KL minus the mean KL over the 10 iterations before the last 10."""
    return end("kl")(run) - window(run, "kl", length(run) - LAST)


def second_half(run: pd.DataFrame) -> float:
    """Returns the growth of the KL from half time to the end."""
    return end("kl")(run) - middle("kl")(run)


def spread(run: pd.DataFrame) -> float:
    """Returns the standard deviation of a role's task reward around its running mean over 10 iterations.

    Standard deviations are computed per role and then averaged, as the mean reward of several agents would be steadier
    than a single agent's.
    """
    spreads = []
    for _, rows in run.groupby("role"):
        rewards = rows.sort_values("iteration")["task_reward"].reset_index(drop=True)
        running = rewards.rolling(LAST).mean().shift(-(LAST // 2 - 1))  # from 5 before to 4 after
        spreads.append(float((rewards - running).dropna().std(ddof=0)))
    return sum(spreads) / len(spreads)


def variance(run: pd.DataFrame) -> float:
    """Returns the square of `spread`."""
    return spread(run) ** 2


def distance_of_agents(run: pd.DataFrame) -> float:
    """Returns the distance between the agents' final combined rewards."""
    ends = [end("combined_reward")(rows) for _, rows in run.groupby("agent")]
    return max(ends) - min(ends)


def share_of_limit(run: pd.DataFrame) -> float:
    """Returns the first role's final response length divided by the largest limit."""
    first_rows = run[run["role"] == run["first_role"]]
    return end("response_tokens")(first_rows) / float(run[LIMIT].iloc[0])


def collapsed(run: pd.DataFrame) -> float:
    """Returns 1.0 if an agent collapsed during training, otherwise 0.0."""
    return float(run["collapse"].notna().any())


def texts_collapsed(run: pd.DataFrame) -> float:
    """Returns 1.0 if an agent's texts collapsed during training, otherwise 0.0."""
    return float(run["texts_collapse"].notna().any())


def time_to_collapse(run: pd.DataFrame) -> float:
    """Returns the time to collapse; the planned number of iterations if no agent collapsed."""
    return float(run["collapse"].fillna(run["planned"]).iloc[0])


# Estimates of a study.


def by_seed(study: Study, family: str, measure: Measure, value: str | None = None) -> pd.Series:
    """Returns a measure of a family's runs by seed, at one value of the swept key (`study.over`), or averaged over all.

    Raises:
        Untested: the study has none of these runs.
    """
    runs = study.runs[study.runs["family"] == family]
    if value is not None:
        runs = runs[runs["value"] == value]
    if runs.empty:
        raise Untested(NOT_RUN, "")
    metrics = study.metrics.merge(runs[RUN], on=RUN)
    by_run = {run: measure(rows) for run, rows in metrics.groupby(RUN)}
    return pd.Series(by_run).groupby(level=1).mean()


def values_of(study: Study) -> list[str]:
    """Returns the values of the swept key in ascending order."""
    return sorted({value for value in study.runs["value"] if value}, key=float)


def measured(name: str, measure: Measure) -> Estimate:
    """Makes an estimate: a measure of one group."""
    return lambda study: over_seeds(by_seed(study, name, measure))


def between(first: str, second: str, measure: Measure, statistic: Statistic) -> Estimate:
    """Makes an estimate: a statistic of two groups' measures."""
    return lambda study: statistic(by_seed(study, first, measure), by_seed(study, second, measure))


def relative(ours: str, rival: str, measure: Measure, whole: Measure) -> Estimate:
    """Makes an estimate: our measure minus the rival's, divided by the rival's mean of `whole` (taken as exact)."""

    def estimate(study: Study) -> Interval:
        scale = float(by_seed(study, rival, whole).mean())
        if not scale > 0:
            raise Untested(OPEN, f"{rival}'s is {scale:.2f}, so a share of it means nothing")
        interval = between(ours, rival, measure, difference)(study)
        value, low, high = (number / scale for number in interval[:3])
        return Interval(value, low, high, *interval[3:])

    return estimate


def provided(premise: Callable[[Study], bool], otherwise: str, estimate: Estimate) -> Estimate:
    """Makes an estimate with a premise. If the premise fails, the claim is untested, for the reason `otherwise`."""

    def estimate_if(study: Study) -> Interval:
        if not premise(study):
            raise Untested(NOT_TESTABLE, otherwise)
        return estimate(study)

    return estimate_if


def of_fixed_roles(name: str, measure: Measure) -> Estimate:
    """Makes an estimate: the ratio of a measure between a group's first agent and its second."""
    agents = ("agent_1", "agent_2")
    return lambda study: ratio(
        *(by_seed(study, name, of_agent(agent, measure)) for agent in agents)
    )


def collapses_later(study: Study) -> Interval:
    """Returns CORY's time to collapse minus PPO's, at the largest value of the swept key."""
    largest = values_of(study)[-1]
    if not by_seed(study, PPO, collapsed, largest).any():
        raise Untested(NOT_TESTABLE, "no run of PPO collapses")
    ours, rival = (by_seed(study, name, time_to_collapse, largest) for name in (CORY, PPO))
    return difference(ours, rival)


def kl_accelerates(study: Study) -> Interval:
    """Returns PPO's KL growth in the second half divided by the first half's, at the swept key's smallest value.

    KL starts at 0, so its growth in the first half is the KL at half time.
    """
    return over_seeds(by_seed(study, PPO, over(second_half, middle("kl")), values_of(study)[0]))


def alone(study: Study) -> Interval:
    """Returns the held-out difference between CORY's agents, each solo, and PPO's agent."""
    values = held_out_by_seed(study, judged_by(study), 1)
    return difference(values[CORY].dropna(), values[PPO].dropna())


def passes(rival: str) -> Estimate:
    """Makes an estimate: CORY's pass@k, averaged over its solo agents, minus a rival's: the smallest difference over k.

    The rival may be the untrained model. The interval's ends are the smallest ends over k, so a lower end above 0 holds
    for all k.
    """

    def estimate(study: Study) -> Interval:
        intervals = []
        for k in [key for key in study.held_out if str(key).startswith("pass@")]:
            values = held_out_by_seed(study, k, 1)
            ours, theirs = values[CORY].dropna(), values[rival].dropna()
            if rival == BASE:  # the untrained model has no seeds
                intervals.append(over_seeds(ours - theirs.iloc[0]))
            else:
                intervals.append(difference(ours, theirs))
        value, low, high, n, _ = (min(numbers) for numbers in zip(*intervals, strict=True))
        return Interval(value, low, high, int(n))

    return estimate
