"""What a run came to, and how much a group of runs spreads. Definitions: docs/metrics.md, "Comparison"."""

import statistics
from collections.abc import Sequence

import numpy as np

from study.records import Record, flat

LAST = 10  # iterations averaged into a final value


def final(run: Record, metric: str, agent: str | None = None) -> float:
    """A metric's mean over the last 10 iterations, of one agent or of all."""
    rows = [row for name in ([agent] if agent else run.agents) for row in run.of(name, LAST)]
    return statistics.fmean(row[metric] for row in rows)


def collapsed(run: Record) -> bool:
    """Whether an agent has collapsed by the last 10 iterations (`cory.metrics.collapsed`)."""
    from cory import metrics  # here, as it imports torch

    start = {row["role"]: row["distinct_2"] for row in run.rows if row["iteration"] == 0}
    bound = flat(run.settings).get("guards.kl_bound", 50.0)
    for agent in run.agents:
        rows = run.of(agent, LAST)
        share = statistics.fmean(row["distinct_2"] / max(start[row["role"]], 1e-9) for row in rows)
        if metrics.collapsed(share, statistics.fmean(row["kl"] for row in rows), bound):
            return True
    return False


def rewards(run: Record) -> list[float]:
    """The task reward of each iteration, mean over agents."""
    import pandas as pd  # here, as importing it takes a while

    return pd.DataFrame(run.rows).groupby("iteration", sort=False)["task_reward"].mean().tolist()


def variance(runs: Sequence[Record]) -> float:
    """Training variance: of the task reward across seeds (mean over agents), averaged over iterations; 0 for one."""
    return variance_of([rewards(run) for run in runs])


def variance_of(series: Sequence[Sequence[float]]) -> float:
    """Variance across series, averaged over their places (as many as the shortest has); 0 for one."""
    if len(series) < 2:
        return 0.0
    length = min(map(len, series))
    return float(np.var([values[:length] for values in series], axis=0, ddof=1).mean())


def spread(values: Sequence[float], digits: int = 3) -> str:
    """`mean ± std`, or the value of a single one."""
    if not values:
        return "none"
    std = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{std}"
