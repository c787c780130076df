"""Measures of runs: final values, how they were reached, and the spread of several runs.

Definitions: docs/metrics.md, "Comparison"; docs/experiments.md, "Claims".
"""

import statistics
from collections.abc import Callable, Sequence

import numpy as np

from study.records import Record, first_role, flat
from study.statistics import over

LAST = 10  # iterations averaged into a final value
mean = statistics.fmean


def final(run: Record, metric: str, agent: str | None = None) -> float:
    """A metric's mean over the last 10 iterations, of one agent or of all."""
    rows = [row for name in ([agent] if agent else run.agents) for row in run.of(name, LAST)]
    return mean(row[metric] for row in rows)


def collapsed(run: Record) -> bool:
    """Whether an agent has collapsed by the last 10 iterations (`cory.metrics.collapsed`)."""
    from cory import metrics  # here, as it imports torch

    start = {row["role"]: row["distinct_2"] for row in run.rows if row["iteration"] == 0}
    bound = flat(run.settings).get("guards.kl_bound", 50.0)
    for agent in run.agents:
        rows = run.of(agent, LAST)
        share = mean(row["distinct_2"] / max(start[row["role"]], 1e-9) for row in rows)
        if metrics.collapsed(share, mean(row["kl"] for row in rows), bound):
            return True
    return False


def rewards(run: Record) -> list[float]:
    """The task reward of each iteration, mean over agents."""
    import pandas as pd  # here, as importing it takes a while

    return pd.DataFrame(run.rows).groupby("iteration", sort=False)["task_reward"].mean().tolist()


def near_zero(values: Sequence[float]) -> bool:
    """Whether values are of both signs, or one is less than a tenth of another: a share of their mean says little."""
    sizes = [abs(value) for value in values]
    return min(values) * max(values) <= 0 or min(sizes) < 0.1 * max(sizes)


def variance(runs: Sequence[Record]) -> float:
    """Training variance: of the task reward across seeds (mean over agents), averaged over iterations; 0 for one."""
    return variance_of([rewards(run) for run in runs])


def variance_of(series: Sequence[Sequence[float]]) -> float:
    """Variance across series, averaged over their places (as many as the shortest has); 0 for one or equal ones."""
    if all(values == series[0] for values in series):
        return 0.0  # without the rounding of their mean
    length = min(map(len, series))
    return float(np.var([values[:length] for values in series], axis=0, ddof=1).mean())


def variance_change(runs: Sequence[Sequence[float]], baseline: Sequence[Sequence[float]]) -> float:
    """Relative difference of two variances. Resamples must have 2 distinct runs of each."""
    return over(variance_of(runs), variance_of(baseline)) - 1


def spread(values: Sequence[float], digits: int = 3) -> str:
    """`mean ± std`, or the value of a single one."""
    if not values:
        return "none"
    std = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{std}"


def end(metric: str) -> Callable[[Record], float]:
    """A metric over the last 10 iterations, mean over agents."""
    return lambda run: final(run, metric)


def start(run: Record) -> float:
    """Task reward of the pioneer (or PPO's only agent) in the first iteration, before any update."""
    pioneer = first_role(run.settings)["name"]
    return next(row["task_reward"] for row in run.rows if row["iteration"] == 0 and row["role"] == pioneer)


def reward_and_gain(run: Record) -> tuple[float, float]:
    """Task reward at the end, and how far that is above the start."""
    return final(run, "task_reward"), final(run, "task_reward") - start(run)


def window(run: Record, metric: str, end: int) -> float:
    """Mean over agents and the 10 iterations before `end`."""
    return mean(row[metric] for row in run.rows if end - LAST <= row["iteration"] < end)


def rise(run: Record) -> float:
    """Change of the combined reward from the first 10 iterations to the last 10."""
    return window(run, "combined_reward", run.iterations) - window(run, "combined_reward", LAST)


def decline(run: Record) -> float:
    """How far the task reward of the last 10 iterations is below that of the 10 about the middle."""
    middle = window(run, "task_reward", run.iterations // 2 + LAST // 2)
    return middle - window(run, "task_reward", run.iterations)


def growth_of_kl(run: Record) -> tuple[float, float]:
    """The increase of the KL in the last 10 iterations, and the KL."""
    end = window(run, "kl", run.iterations)
    return end - window(run, "kl", run.iterations - LAST), end


def halves_of_kl(run: Record) -> tuple[float, float]:
    """The increase of the KL in the second half of the run, and in the first."""
    middle = window(run, "kl", run.iterations // 2 + LAST // 2)
    return window(run, "kl", run.iterations) - middle, middle


def early_gain(run: Record) -> tuple[float, float]:
    """Gain in task reward by iterations 11 to 20, and by the end."""
    return window(run, "task_reward", 2 * LAST) - start(run), reward_and_gain(run)[1]


def unsteadiness(run: Record) -> float:
    """Standard deviation of a role's task reward around its running mean over 10 iterations, mean over roles.

    By role, as the mean over agents is of more responses the more agents there are, and so is steadier by itself.
    """
    spreads = []
    for role in dict.fromkeys(row["role"] for row in run.rows):
        series = np.array([row["task_reward"] for row in run.rows if row["role"] == role])
        smooth = np.convolve(series, np.ones(LAST) / LAST, "valid")
        spreads.append(float((series[LAST // 2 : LAST // 2 + len(smooth)] - smooth).std()))
    return mean(spreads)


def distinct_share(run: Record) -> float:
    """Distinct-2 at the end over that of the same role in the first iteration, mean over agents."""
    start = {row["role"]: row["distinct_2"] for row in run.rows if row["iteration"] == 0}
    return mean(over(row["distinct_2"], start[row["role"]]) for agent in run.agents for row in run.of(agent, LAST))


def share_of_limit(run: Record) -> float:
    """Length of the pioneer's responses at the end over the longest allowed."""
    pioneer = first_role(run.settings)
    rows = [row for row in run.rows if row["role"] == pioneer["name"] and row["iteration"] >= run.iterations - LAST]
    return mean(row["response_tokens"] for row in rows) / (
        pioneer.get("max_new_tokens") or flat(run.settings)["sampling.max_new_tokens"]
    )


def agents(metric: str) -> Callable[[Record], tuple[float, float]]:
    """A metric over the last 10 iterations, of the first agent and of the second."""
    return lambda run: (final(run, metric, run.agents[0]), final(run, metric, run.agents[1]))


def apart_and_gain(run: Record) -> tuple[float, float]:
    """How far apart the agents' combined rewards end, and the gain in task reward."""
    one, two = agents("combined_reward")(run)
    return abs(one - two), reward_and_gain(run)[1]
